//! Tests that the table of executions that use staging memory stays small, however many executions there are.

use super::*;
use std::any::Any;

#[derive(Debug)]
struct Ended(bool);

impl crate::backend::CompletionState for Ended {
    fn is_done(&self) -> Result<bool, BackendError> {
        Ok(self.0)
    }
    fn wait(&self) -> Result<(), BackendError> {
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[test]
fn executions_that_have_ended_leave_the_table() {
    let staging = Staging::new(0);
    for i in 0..100_000 {
        let regions = Regions::new([Region { start: 10 * i, end: 10 * i + 10 }]);
        staging.in_turn(&regions, |_| Ok::<Completion, ()>(Arc::new(Ended(true)))).expect("never fails");
        let users = lock(&staging.users);
        assert!(users.last.len() <= SWEEP_AT_LEAST + 1 && users.uses.len() == users.last.len());
    }
}

#[test]
fn executions_of_the_same_regions_replace_each_other_even_before_they_end() {
    let mut users = Users::default();
    let regions = [(0, 100), (1000, 1100), (50, 60)].map(|(start, end)| Regions::new([Region { start, end }]));
    for i in 0..10_000 {
        users.record(&regions[i % 3], Arc::new(Ended(false)));
        // The third region divides the first one into three ranges.
        assert!(users.last.len() <= 4 && users.uses.len() <= 3);
    }
}
