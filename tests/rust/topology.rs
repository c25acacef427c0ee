use mpgpu::topology::{self, Machine};
#[test]
fn every_preset_loads_and_compiles() {
    for name in topology::preset_names() {
        let topology = topology::load(name).unwrap();
        assert_eq!(topology.name, name);
        Machine::new(topology).unwrap();
    }
}
