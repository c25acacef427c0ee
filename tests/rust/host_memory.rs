//! Tests pages of host memory: that they are resident, that they are on the right NUMA nodes, and that only permitted CPUs touch them.

use super::*;

/// Returns one value for each page of a range: true if the page is resident.
fn resident(base: usize, bytes: usize) -> io::Result<Vec<bool>> {
    let mut pages = vec![0_u8; bytes.div_ceil(page_bytes())];
    // SAFETY: the system checks the range; the output has a byte for each page.
    let told = unsafe { libc::mincore(with_exposed_provenance_mut(base), bytes, pages.as_mut_ptr()) };
    if told == 0 { Ok(pages.iter().map(|page| page & 1 == 1).collect()) } else { Err(io::Error::last_os_error()) }
}

fn content(pages: &mut HostPages) -> &mut [u8] {
    // SAFETY: the whole mapping, which belongs to the test.
    unsafe { std::slice::from_raw_parts_mut(with_exposed_provenance_mut(pages.base()), pages.bytes()) }
}

#[test]
fn pages_are_zero_resident_and_aligned_and_go_away() {
    for bytes in [1, 4097, (2 << 20) - 1, 2 << 20, (37 << 20) + 5] {
        let mut pages = HostPages::new(bytes, None).expect("memory");
        assert!(pages.bytes() >= bytes && pages.bytes() - bytes < page_bytes(), "{bytes}: {pages:?}");
        assert_eq!(pages.base() % huge_page_bytes().filter(|huge| bytes >= *huge).unwrap_or(page_bytes()), 0, "{bytes}");
        assert!(resident(pages.base(), pages.bytes()).expect("mapped").iter().all(|there| *there), "{bytes}");
        assert!(content(&mut pages).iter().all(|byte| *byte == 0), "{bytes}");
        content(&mut pages).fill(0xa5);
        assert!(content(&mut pages).iter().all(|byte| *byte == 0xa5), "{bytes}");
    }
    // The range is larger than any mapping of other threads of this test program, so that no other mapping takes its place meanwhile.
    let pages = HostPages::map(1 << 30, 2 << 20, page_bytes()).expect("address space");
    let (base, bytes) = (pages.base(), pages.bytes());
    assert!(resident(base, bytes).expect("mapped").iter().all(|there| !there), "pages that nobody has touched");
    drop(pages);
    assert!(resident(base, bytes).is_err(), "the mapping is still there");
}

#[test]
fn more_than_there_is_is_refused_and_not_tried() {
    for bytes in [1 << 50, usize::MAX - 1] {
        assert_eq!(HostPages::new(bytes, None).expect_err("too much").kind(), io::ErrorKind::OutOfMemory);
    }
    let text = "MemTotal:       24620000 kB\nMemFree:  1 kB\nMemAvailable:   23000100 kB\nBuffers: 7 kB\n";
    assert_eq!(entry_bytes(text, "MemAvailable:"), Some(23_000_100 * 1024));
    assert_eq!(entry_bytes("MemFree: 1 kB\n", "MemAvailable:"), None);
    assert_eq!(entry_bytes("MemAvailable: many kB\n", "MemAvailable:"), None);
}

#[test]
fn a_domain_that_the_system_has_or_has_not_gets_its_memory() {
    let nodes = nodes(Path::new("/sys/devices/system/node"));
    for domain in (0..nodes.len()).chain([63, 1000]) {
        let pages = HostPages::new(5 << 20, Some(domain)).expect("memory");
        assert!(resident(pages.base(), pages.bytes()).expect("mapped").iter().all(|there| *there), "domain {domain}");
        let place = node_of((pages.base() + pages.bytes() / 2) as u64);
        if let (Some((number, _)), Some(place)) = (nodes.get(domain), place) {
            assert_eq!(place, *number, "domain {domain}");
        }
    }
}

#[test]
fn the_calling_thread_keeps_its_cpus_and_a_bound_one_uses_no_others() {
    let before = allowed_cpus();
    assert!(!before.is_empty());
    drop(HostPages::new(9 << 20, None).expect("memory"));
    assert_eq!(allowed_cpus(), before);
    // A separate thread is bound to the last CPU of this process. The threads that it starts must not use another CPU.
    let last = *before.last().expect("some CPU");
    std::thread::spawn(move || {
        stay_on(&[last]);
        assert_eq!(allowed_cpus(), [last]);
        let groups: Vec<Vec<usize>> =
            group(&allowed_cpus(), &nodes(Path::new("/sys/devices/system/node"))).into_iter().map(|(_, cpus)| cpus).collect();
        assert_eq!(spread(&groups, MOST_THREADS), [last]);
        drop(HostPages::new(9 << 20, None).expect("memory"));
    })
    .join()
    .expect("no assertion failed");
}

#[test]
fn lists_of_cpus_are_read_as_the_kernel_writes_them() {
    assert_eq!(cpu_list("0-3,8,10-11\n"), [0, 1, 2, 3, 8, 10, 11]);
    assert_eq!(cpu_list("\n"), [0_usize; 0]);
    assert_eq!(cpu_list("7"), [7]);
}

#[test]
fn nodes_without_cpus_are_none_and_the_order_is_that_of_the_numbers() {
    let folder = std::env::temp_dir().join(format!("mpgpu-nodes-{}", std::process::id()));
    for (name, cpus) in [("node10", "6-7\n"), ("node0", "0-1,4-5\n"), ("node2", "\n"), ("node1", "2-3\n"), ("power", "9\n")] {
        std::fs::create_dir_all(folder.join(name)).expect("a folder for the test");
        std::fs::write(folder.join(name).join("cpulist"), cpus).expect("a file for the test");
    }
    let found = nodes(&folder);
    std::fs::remove_dir_all(&folder).expect("the folder was the test's own");
    assert_eq!(found, [(0, vec![0, 1, 4, 5]), (1, vec![2, 3]), (10, vec![6, 7])]);
    // The process is bound to CPUs of two of the three NUMA nodes.
    assert_eq!(group(&[1, 6, 7], &found), [(0, vec![1]), (10, vec![6, 7])]);
    assert_eq!(group(&[1, 6, 7], &[]), [(0, vec![1, 6, 7])]);
    assert_eq!(group(&[], &found), []);
}

#[test]
fn threads_take_turns_among_the_nodes_and_are_no_more_than_the_cpus() {
    let nodes = [vec![0, 1, 2, 3], vec![4, 5, 6, 7]];
    assert_eq!(spread(&nodes, 4), [0, 4, 3, 7]);
    let mut all = spread(&nodes, 100);
    assert!(all.chunks(2).all(|pair| pair[0] < 4 && pair[1] >= 4), "{all:?}");
    all.sort_unstable();
    assert_eq!(all, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(spread(&nodes, 1), [0]);
    assert_eq!(spread(&[], 5), [0_usize; 0]);
}

#[test]
fn where_nodes_are_hidden_both_ways_of_numbering_two_sockets_come_out_spread() {
    for cpus in [16, 64, 96, 192, 224] {
        let chosen = spread(&[(0..cpus).collect()], MOST_THREADS);
        let mut distinct = chosen.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), chosen.len(), "{cpus}: {chosen:?}");
        let first_half = chosen.iter().filter(|cpu| **cpu < cpus / 2).count();
        let even = chosen.iter().filter(|cpu| **cpu % 2 == 0).count();
        assert_eq!((first_half, even), (MOST_THREADS / 2, MOST_THREADS / 2), "{cpus}: {chosen:?}");
    }
}

#[test]
fn a_thread_goes_to_the_node_of_a_page_that_is_there_and_stays_otherwise() {
    let pages = HostPages::new(1, None).expect("memory");
    let untouched = HostPages::map(1 << 30, 2 << 20, page_bytes()).expect("address space");
    assert_eq!(node_of(untouched.base() as u64 + (1 << 29)), None, "no page is there");
    assert_eq!(node_of(8), None, "no memory is there");
    let Some(node) = node_of(pages.base() as u64 + 5) else { return println!("the system does not say where pages are") };
    let cpus = allowed_cpus();
    let (first, last) = (cpus[0], cpus[cpus.len() - 1]);
    // A separate thread, which can be bound to CPUs, makes the machine appear to have two NUMA nodes.
    let bound = |groups: Vec<(u32, Vec<usize>)>, address: u64| {
        let go = move || {
            NearMemory { groups, node: None }.go_to(address);
            allowed_cpus()
        };
        std::thread::spawn(go).join().expect("it ends")
    };
    let (here, there) = ((node, vec![last]), (node + 1, vec![first]));
    assert_eq!(bound(vec![here.clone(), there.clone()], pages.base() as u64), [last]);
    assert_eq!(bound(vec![there.clone(), (node + 2, vec![last])], pages.base() as u64), cpus, "no CPU of that node may be used");
    assert_eq!(bound(vec![here, there], untouched.base() as u64 + (1 << 29)), cpus, "whoever touches the page gets it");
    assert_ne!(NearMemory::of_this_thread().groups.len(), 1, "one node asks for no calls");
}
