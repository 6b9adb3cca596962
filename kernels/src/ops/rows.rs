//! Rows over the threads of the pool.

use crate::pool::{self, SharedMut};

/// Elements worth a task of their own: some microseconds of work.
const GRAIN: usize = 8192;

/// Runs `task(first row, rows)` over pieces of `y`, whose rows have `cols` elements. Few rows run where they are.
pub(crate) fn parallel<T: Send>(y: &mut [T], cols: usize, task: &(dyn Fn(usize, &mut [T]) + Sync)) {
    if cols > 0 {
        let rows = GRAIN.div_ceil(cols);
        pool::parallel_chunks(y, rows * cols, &|piece, y| task(piece * rows, y));
    }
}

/// The same over two tensors of one shape.
pub(crate) fn parallel_pairs<T: Send>(
    x: &mut [T],
    y: &mut [T],
    cols: usize,
    task: &(dyn Fn(&mut [T], &mut [T]) + Sync),
) {
    assert_eq!(x.len(), y.len(), "two tensors of one shape");
    let y = SharedMut::new(y);
    parallel(x, cols, &|first, x| {
        let start = first * cols;
        // SAFETY: the pieces of x do not overlap, so neither do these, and y is borrowed until all are done.
        task(x, unsafe { y.slice(start..start + x.len()) });
    });
}
