//! The process-wide pool of CPU threads.

/// Runs `task(i)` for every `i` below `num_tasks`, on all threads of the pool, and returns when all are done.
pub fn parallel_for(num_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    for i in 0..num_tasks {
        task(i);
    }
}
