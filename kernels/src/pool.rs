//! The process-wide pool of CPU threads: one fork-join at a time, made for calls of a few microseconds.
//!
//! Threads start with the first call that has work for two. The caller takes part; indices are claimed one by one through an
//! atomic, so a thread that the system holds up costs its own claim and no more. A worker that is still asleep when the others
//! are done is not waited for. Workers spin for a moment between calls, since a forward pass makes the next one at once, then
//! park. A call allocates nothing.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long an idle worker looks for the next call before it parks. Longer than the gap between two ops of a forward pass,
/// short enough that an idle server does not warm the room.
const SPIN: Duration = Duration::from_micros(40);

type Task<'a> = &'a (dyn Fn(usize) + Sync);

/// Runs `task(i)` for every `i` below `num_tasks`, on all threads of the pool, and returns when all are done.
///
/// A call from inside a task runs on its own thread alone; calls from several threads at once take turns.
///
/// # Panics
/// If a task panics, with its payload, after all threads have left the call.
pub fn parallel_for(num_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    if num_tasks < 2 || IN_TASK.get() || num_threads() == 1 {
        (0..num_tasks).for_each(task);
        return;
    }
    pool().run(num_tasks, task);
}

/// Cuts `data` into pieces of `len` elements, the last one shorter, and runs `task(i, piece i)` on all threads of the pool.
pub fn parallel_chunks<T: Send>(data: &mut [T], len: usize, task: &(dyn Fn(usize, &mut [T]) + Sync)) {
    let total = data.len();
    let base = SharedMut::new(data);
    parallel_for(total.div_ceil(len.max(1)), &|i| {
        let range = i * len..total.min((i + 1) * len);
        // SAFETY: each i comes once, and the ranges of two do not overlap.
        task(i, unsafe { base.slice(range) });
    });
}

/// A slice that tasks write to side by side, each its own part.
pub(crate) struct SharedMut<T> {
    address: *mut T,
    len: usize,
}

// SAFETY: only `slice` gives access, whose callers promise that no two parts overlap.
unsafe impl<T: Send> Send for SharedMut<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<T> {}

impl<T> SharedMut<T> {
    pub(crate) fn new(data: &mut [T]) -> Self {
        SharedMut { address: data.as_mut_ptr(), len: data.len() }
    }

    /// # Safety
    /// The slice this was made from must still be borrowed, and no other part in use may overlap this one.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that parts do not overlap")]
    #[inline]
    pub(crate) unsafe fn slice(&self, range: std::ops::Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {}", self.len);
        // SAFETY: inside the slice as just checked; alone on it by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.address.add(range.start), range.len()) }
    }
}

/// Sets the number of threads, callers included. Without it: the cores this process may use.
///
/// # Errors
/// The number that holds, if the pool was sized already.
pub fn set_threads(num_threads: usize) -> Result<(), usize> {
    let wanted = num_threads.max(1);
    let sized = *NUM_THREADS.get_or_init(|| wanted);
    if sized == wanted { Ok(()) } else { Err(sized) }
}

/// Threads that take part in a call, the caller among them.
pub fn num_threads() -> usize {
    *NUM_THREADS.get_or_init(|| thread::available_parallelism().map_or(1, usize::from))
}

static NUM_THREADS: OnceLock<usize> = OnceLock::new();
static POOL: OnceLock<&'static Pool> = OnceLock::new();

thread_local! {
    /// Whether this thread is inside a task, where further calls run inline.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

fn pool() -> &'static Pool {
    POOL.get_or_init(|| {
        let pool: &'static Pool = Box::leak(Box::new(Pool::new()));
        for i in 1..num_threads() {
            let spawned = thread::Builder::new().name(format!("kernels-{i}")).spawn(|| pool.work());
            if let Err(error) = spawned {
                tracing::warn!(%error, started = i, "fewer pool threads than cores");
                break;
            }
        }
        pool
    })
}

/// A value on cache lines of its own, so that those who spin on one do not slow writers of another.
#[repr(align(128))]
struct Padded<T>(T);

struct Pool {
    /// Held by the caller whose turn it is.
    turn: Mutex<()>,
    /// The call in progress. Written only by the holder of `turn` while `open` is false and `active` zero.
    job: UnsafeCell<Option<Job>>,
    /// Counts calls; a worker looks at each at most once.
    call: Padded<AtomicU64>,
    /// Whether workers may enter the call.
    open: Padded<AtomicBool>,
    /// Workers that may be reading `job`.
    active: Padded<AtomicUsize>,
    /// The next index to claim.
    next: Padded<AtomicUsize>,
    /// Workers that are parked or about to.
    sleepers: Padded<AtomicUsize>,
    bed: Mutex<()>,
    wake: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

#[derive(Clone, Copy)]
struct Job {
    /// The borrow is really the caller's, who does not return before all workers have left.
    task: Task<'static>,
    num_tasks: usize,
}

// SAFETY: `job` is the only field that is not Sync by itself; who may touch it when is said there, and `enter` and `run` keep to it.
unsafe impl Sync for Pool {}

impl Pool {
    fn new() -> Self {
        Pool {
            turn: Mutex::new(()),
            job: UnsafeCell::new(None),
            call: Padded(AtomicU64::new(0)),
            open: Padded(AtomicBool::new(false)),
            active: Padded(AtomicUsize::new(0)),
            next: Padded(AtomicUsize::new(0)),
            sleepers: Padded(AtomicUsize::new(0)),
            bed: Mutex::new(()),
            wake: Condvar::new(),
            panic: Mutex::new(None),
        }
    }

    fn run(&self, num_tasks: usize, task: Task<'_>) {
        let turn = lock(&self.turn);
        // SAFETY: only the lifetime changes; workers use the borrow between `open` and the wait for `active` below, and this
        // function does not return before that.
        let task: Task<'static> = unsafe { std::mem::transmute::<Task<'_>, Task<'static>>(task) };
        let job = Job { task, num_tasks };
        // SAFETY: the turn is ours, and the call before ended with `open` false and no worker inside.
        unsafe { *self.job.get() = Some(job) };
        self.next.0.store(0, Ordering::Relaxed);
        self.open.0.store(true, Ordering::SeqCst);
        self.call.0.fetch_add(1, Ordering::SeqCst);
        if self.sleepers.0.load(Ordering::SeqCst) > 0 {
            let _bed = lock(&self.bed);
            self.wake.notify_all();
        }

        self.claim(job);
        self.open.0.store(false, Ordering::SeqCst);
        // SeqCst on both sides: a worker that this loop misses has not yet seen `open`, and will see it false.
        let mut spins = 0u32;
        while self.active.0.load(Ordering::SeqCst) > 0 {
            spins += 1;
            // A worker that was put aside needs this core to finish.
            if spins.is_multiple_of(1024) { thread::yield_now() } else { std::hint::spin_loop() }
        }
        let panic = lock(&self.panic).take();
        drop(turn);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// A worker's life.
    fn work(&self) {
        let mut seen = 0;
        loop {
            seen = self.wait(seen);
            self.active.0.fetch_add(1, Ordering::SeqCst);
            if self.open.0.load(Ordering::SeqCst) {
                // SAFETY: counted in `active` and then found `open`: the caller waits for us before it lets go of the job.
                if let Some(job) = unsafe { *self.job.get() } {
                    self.claim(job);
                }
            }
            self.active.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Returns when there has been a call after number `seen`.
    fn wait(&self, seen: u64) -> u64 {
        let idle_since = Instant::now();
        loop {
            for _ in 0..32 {
                let call = self.call.0.load(Ordering::SeqCst);
                if call != seen {
                    return call;
                }
                std::hint::spin_loop();
            }
            if idle_since.elapsed() > SPIN {
                break;
            }
        }
        let mut bed = lock(&self.bed);
        // SeqCst: either the caller sees a sleeper, or we see its call.
        self.sleepers.0.fetch_add(1, Ordering::SeqCst);
        while self.call.0.load(Ordering::SeqCst) == seen {
            bed = self.wake.wait(bed).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.0.fetch_sub(1, Ordering::SeqCst);
        self.call.0.load(Ordering::SeqCst)
    }

    /// Runs indices until none is left. A panic ends the call: the indices not yet claimed are dropped.
    fn claim(&self, job: Job) {
        IN_TASK.set(true);
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let i = self.next.0.fetch_add(1, Ordering::Relaxed);
                if i >= job.num_tasks {
                    break;
                }
                (job.task)(i);
            }
        }));
        IN_TASK.set(false);
        if let Err(payload) = result {
            self.next.0.store(job.num_tasks, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(payload);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while one of these locks is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_index_runs_once() {
        for num_tasks in [0, 1, 2, 3, 64, 1000] {
            let runs: Vec<AtomicUsize> = (0..num_tasks).map(|_| AtomicUsize::new(0)).collect();
            parallel_for(num_tasks, &|i| {
                runs[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{num_tasks} tasks");
        }
    }

    #[test]
    fn many_short_calls_in_a_row() {
        let sum = AtomicUsize::new(0);
        for _ in 0..20_000 {
            parallel_for(3, &|i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.into_inner(), 60_000);
    }

    #[test]
    fn a_call_within_a_task_runs_inline() {
        let sum = AtomicUsize::new(0);
        parallel_for(4, &|_| {
            let here = thread::current().id();
            parallel_for(4, &|i| {
                assert_eq!(thread::current().id(), here);
                sum.fetch_add(i, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 24);
    }

    #[test]
    fn callers_take_turns() {
        let sum = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        parallel_for(8, &|i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 4 * 500 * 28);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let run = || parallel_for(100, &|i| assert!(i != 40, "task 40 fails"));
        let payload = catch_unwind(run).unwrap_err();
        assert_eq!(payload.downcast_ref::<&str>(), Some(&"task 40 fails"));
        let sum = AtomicUsize::new(0);
        parallel_for(10, &|i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }

    #[test]
    fn chunks_cover_the_slice() {
        let mut data = vec![0usize; 103];
        parallel_chunks(&mut data, 10, &|i, chunk| chunk.fill(i + 1));
        assert!(data.iter().enumerate().all(|(at, &value)| value == at / 10 + 1));
    }

    #[test]
    fn the_size_is_fixed_by_its_first_use() {
        let sized = num_threads();
        assert_eq!(set_threads(sized), Ok(()));
        assert_eq!(set_threads(sized + 1), Err(sized));
    }
}
