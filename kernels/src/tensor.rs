//! Contiguous tensors of up to four dimensions, and views of their rows.
//!
//! A tensor has one owner and no clones, so `&Tensor` and `&mut Tensor` mean for its elements what they mean for any value.
//! Memory comes from the device, from a [`Workspace`](crate::Workspace), or, for a view, from the tensor it borrows.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

use crate::device::{Buffer, Device};
use crate::dtype::{DType, Element};
use crate::error::{KernelError, Result};
use crate::workspace::Lease;

/// Lengths of up to four dimensions, outermost first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    dims: [usize; 4],
    rank: usize,
}

impl Shape {
    pub fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    pub fn num_elements(&self) -> usize {
        self.dims().iter().product()
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(from: [usize; N]) -> Self {
        const { assert!(N <= 4, "tensors have at most four dimensions") };
        let mut dims = [1; 4];
        dims[..N].copy_from_slice(&from);
        Shape { dims, rank: N }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Keeps a tensor's memory alive. Never read: what it does is drop.
#[expect(dead_code, reason = "held for its Drop")]
pub(crate) enum Owner {
    Buffer(Buffer),
    Lease(Lease),
    /// A view: the lifetime of [`View`] keeps the owner alive.
    Borrowed,
}

/// A contiguous array on a device.
pub struct Tensor {
    address: NonNull<u8>,
    shape: Shape,
    dtype: DType,
    device: Device,
    _owner: Owner,
}

// SAFETY: a tensor is the only access to its memory (views borrow it), and the memory is plain numbers.
unsafe impl Send for Tensor {}
// SAFETY: `&Tensor` only reads.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// A tensor of zeros in memory of its own.
    ///
    /// # Errors
    /// `OutOfMemory`, naming `what`.
    pub fn zeros(device: &Device, what: &'static str, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        Tensor::with(device, what, shape.into(), dtype, Device::alloc)
    }

    /// As [`zeros`](Self::zeros), on the CPU without memory before it is written to: a weight that is only looked at costs nothing.
    ///
    /// # Errors
    /// As [`zeros`](Self::zeros).
    pub(crate) fn lazy_zeros(
        device: &Device,
        what: &'static str,
        shape: impl Into<Shape>,
        dtype: DType,
    ) -> Result<Self> {
        Tensor::with(device, what, shape.into(), dtype, Device::alloc_lazy)
    }

    fn with(
        device: &Device,
        what: &'static str,
        shape: Shape,
        dtype: DType,
        alloc: fn(&Device, &'static str, usize) -> Result<Buffer>,
    ) -> Result<Self> {
        let wanted = shape.dims().iter().try_fold(dtype.bytes(), |bytes, &dim| bytes.checked_mul(dim));
        let wanted = wanted.ok_or(KernelError::OutOfMemory { what, wanted: usize::MAX, free: 0 })?;
        let buffer = alloc(device, what, wanted)?;
        Ok(Tensor { address: buffer.address(), shape, dtype, device: device.clone(), _owner: Owner::Buffer(buffer) })
    }

    /// A tensor that holds a copy of `values`.
    ///
    /// # Errors
    /// `Shape` if their number differs from the shape's, `OutOfMemory`.
    pub fn from_slice<T: Element>(
        device: &Device,
        what: &'static str,
        values: &[T],
        shape: impl Into<Shape>,
    ) -> Result<Self> {
        let mut tensor = Tensor::zeros(device, what, shape, T::DTYPE)?;
        tensor.copy_from_slice(values)?;
        Ok(tensor)
    }

    /// # Safety
    /// `address` must point to `shape.num_elements()` elements of `dtype` on `device`, aligned for them, which `owner` keeps
    /// alive and nothing else reads or writes while the tensor lives.
    pub(crate) unsafe fn from_raw(
        address: NonNull<u8>,
        shape: Shape,
        dtype: DType,
        device: Device,
        owner: Owner,
    ) -> Self {
        Tensor { address, shape, dtype, device, _owner: owner }
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    pub fn dims(&self) -> &[usize] {
        self.shape.dims()
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn size_bytes(&self) -> usize {
        self.shape.num_elements() * self.dtype.bytes()
    }

    /// The last dimension, and the product of all before it.
    pub fn rows_cols(&self) -> (usize, usize) {
        match self.dims() {
            [] => (1, 1),
            [rows @ .., cols] => (rows.iter().product(), *cols),
        }
    }

    /// The elements, on the CPU.
    ///
    /// # Panics
    /// If `T` is not the tensor's dtype: a bug in an op, which checks dtypes before it reads.
    pub fn as_slice<T: Element>(&self) -> &[T] {
        self.assert_host::<T>();
        // SAFETY: the address holds that many elements of this dtype (`from_raw`, `zeros`), and `&self` excludes writers.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr().cast(), self.shape.num_elements()) }
    }

    /// The elements, on the CPU, to write.
    ///
    /// # Panics
    /// As [`as_slice`](Self::as_slice).
    pub fn as_mut_slice<T: Element>(&mut self) -> &mut [T] {
        self.assert_host::<T>();
        // SAFETY: as in `as_slice`, and `&mut self` excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr().cast(), self.shape.num_elements()) }
    }

    /// The address in its device's own numbering: for kernels, and to tell whether two tensors lie in the same place.
    pub fn device_address(&self) -> u64 {
        self.address.as_ptr() as u64
    }

    fn assert_host<T: Element>(&self) {
        assert!(self.device == Device::Cpu, "tensor on {} read as host memory", self.device);
        assert!(self.dtype == T::DTYPE, "tensor of {} read as {}", self.dtype, T::DTYPE);
    }

    /// Overwrites all elements from the host.
    ///
    /// # Errors
    /// `Shape` or `DType` if `values` does not fit.
    pub fn copy_from_slice<T: Element>(&mut self, values: &[T]) -> Result<()> {
        let (op, arg) = ("copy_from_slice", "values");
        if self.dtype != T::DTYPE {
            return Err(KernelError::DType { op, arg, dtype: T::DTYPE });
        }
        if values.len() != self.shape.num_elements() {
            return Err(KernelError::Shape { op, arg, got: Shape::from([values.len()]), want: self.shape });
        }
        match &self.device {
            Device::Cpu => {
                self.as_mut_slice().copy_from_slice(values);
                Ok(())
            }
            // SAFETY: the tensor holds as many elements of this type, whose bytes are plain.
            Device::Cuda(device) => unsafe { device.write(self.address.as_ptr(), bytes_of(values)) },
        }
    }

    /// All elements, copied to the host.
    ///
    /// # Errors
    /// `DType` if `T` is not the tensor's.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        if self.dtype != T::DTYPE {
            return Err(KernelError::DType { op: "to_vec", arg: "self", dtype: self.dtype });
        }
        match &self.device {
            Device::Cpu => Ok(self.as_slice().to_vec()),
            Device::Cuda(device) => {
                let mut values: Vec<T> = Vec::with_capacity(self.shape.num_elements());
                // SAFETY: the vector's spare room is as many bytes as the tensor's, all of which `read` writes before the length is
                // set; any bit pattern is a value of an `Element`.
                unsafe {
                    let room = std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), self.size_bytes());
                    device.read(self.address.as_ptr(), room)?;
                    values.set_len(self.shape.num_elements());
                }
                Ok(values)
            }
        }
    }

    /// Rows `range` of the outermost dimension.
    ///
    /// # Panics
    /// If the range is outside the tensor.
    pub fn rows(&self, range: Range<usize>) -> View<'_> {
        View { tensor: self.slice_rows(range), _tensor: PhantomData }
    }

    /// Rows `range` of the outermost dimension, to write.
    ///
    /// # Panics
    /// As [`rows`](Self::rows).
    pub fn rows_mut(&mut self, range: Range<usize>) -> ViewMut<'_> {
        ViewMut { tensor: self.slice_rows(range), _tensor: PhantomData }
    }

    fn slice_rows(&self, range: Range<usize>) -> Tensor {
        let mut shape = self.shape;
        let row_bytes = self.size_bytes().checked_div(shape.dims[0]).unwrap_or(0);
        assert!(range.start <= range.end && range.end <= shape.dims[0], "rows {range:?} of a tensor {shape}");
        shape.dims[0] = range.len();
        // SAFETY: the range lies inside the tensor, and the view that wraps the result borrows it.
        unsafe {
            let address = self.address.add(range.start * row_bytes);
            Tensor::from_raw(address, shape, self.dtype, self.device.clone(), Owner::Borrowed)
        }
    }

    /// Fails unless the shape is `want`.
    pub fn expect_shape(&self, op: &'static str, arg: &'static str, want: impl Into<Shape>) -> Result<()> {
        let want = want.into();
        if self.shape == want { Ok(()) } else { Err(KernelError::Shape { op, arg, got: self.shape, want }) }
    }

    /// Fails unless the dtype is `want`.
    pub fn expect_dtype(&self, op: &'static str, arg: &'static str, want: DType) -> Result<()> {
        if self.dtype == want { Ok(()) } else { Err(KernelError::DType { op, arg, dtype: self.dtype }) }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor {} {} on {}", self.shape, self.dtype, self.device)
    }
}

fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: an `Element` is plain numbers without padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Some rows of a tensor, to read.
pub struct View<'a> {
    tensor: Tensor,
    _tensor: PhantomData<&'a Tensor>,
}

impl Deref for View<'_> {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

/// Some rows of a tensor, to read and write.
pub struct ViewMut<'a> {
    tensor: Tensor,
    _tensor: PhantomData<&'a mut Tensor>,
}

impl Deref for ViewMut<'_> {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

impl DerefMut for ViewMut<'_> {
    fn deref_mut(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_a_window_onto_the_same_memory() {
        let mut x = Tensor::from_slice(&Device::Cpu, "x", &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], [3, 2]).unwrap();
        x.rows_mut(1..2).as_mut_slice::<f32>().copy_from_slice(&[30.0, 40.0]);
        assert_eq!(x.as_slice::<f32>(), [1.0, 2.0, 30.0, 40.0, 5.0, 6.0]);
        assert_eq!(x.rows(1..3).as_slice::<f32>(), [30.0, 40.0, 5.0, 6.0]);
        assert_eq!(x.rows(3..3).dims(), [0, 2]);
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let mut x = Tensor::zeros(&Device::Cpu, "x", [2, 2], DType::F32).unwrap();
        assert_eq!(
            x.copy_from_slice(&[1.0f32]).unwrap_err().to_string(),
            "copy_from_slice: values has shape [1], expected [2, 2]"
        );
        assert_eq!(x.expect_shape("op", "x", [4]).unwrap_err().to_string(), "op: x has shape [2, 2], expected [4]");
        assert!(x.to_vec::<i32>().is_err());
        let huge = Tensor::zeros(&Device::Cpu, "kv", [usize::MAX, 2], DType::F32);
        assert!(huge.unwrap_err().to_string().contains("for kv"));
    }
}
