//! One NVIDIA GPU: its primary context, one stream, and its kernels.
//!
//! All work of a device runs on its one stream, in the order given, so tensors need no events between ops. The driver is found at run
//! time: a build with kernels starts on a machine without it, and says so only when a GPU is asked for.

mod blas;
mod event;
mod graph;
mod launch;
mod memory;
mod tensor_map;

use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::{result, sys};

pub(crate) use blas::Product;
pub use event::Event;
pub use graph::Graph;
pub(crate) use launch::{Arg, Launch};
pub(crate) use memory::CudaBuffer;
pub use memory::Pinned;
pub(crate) use tensor_map::TensorMap;

use crate::error::{KernelError, Result};

include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

/// The oldest driver interface that the embedded kernels load on: CUDA 13.0.
const OLDEST_DRIVER: i32 = 13_000;

/// How many blocks of a launch may be counted apart: pairs of a sequence and a KV head.
pub(crate) const COUNTERS: usize = 1 << 18;

/// What each multiprocessor may leave of a product whose parts are added later: four parts of 128 rows of 128 outputs, f32.
const PARTS_BYTES: usize = 4 * 128 * 128 * 4;

/// A GPU, opened.
pub struct CudaDevice {
    ordinal: usize,
    name: String,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    num_multiprocessors: u32,
    is_hopper: bool,
    kernels: Mutex<Kernels>,
    /// Made at the first product of many rows: loading the library takes a while, and a GPU can do without.
    blas: OnceLock<blas::Blas>,
    loading_blas: Mutex<()>,
    /// Zero between kernels: blocks of one launch count each other here.
    counters: sys::CUdeviceptr,
    /// Where blocks of one launch leave parts of a product for each other; none unless sums have a fixed order.
    parts: Option<sys::CUdeviceptr>,
}

/// Loaded modules by source, and their functions by source and name.
#[derive(Default)]
struct Kernels {
    modules: HashMap<&'static str, sys::CUmodule>,
    functions: HashMap<(&'static str, &'static str), Function>,
}

/// A kernel that can be launched; lives as long as its device.
#[derive(Clone, Copy)]
pub(crate) struct Function(sys::CUfunction);

// SAFETY: the driver's handles may be used from any thread; who launches in which order is decided by the owner of the device.
unsafe impl Send for CudaDevice {}
// SAFETY: as above; what is mutable is behind a mutex.
unsafe impl Sync for CudaDevice {}
// SAFETY: as above.
unsafe impl Send for Function {}

impl CudaDevice {
    pub(super) fn new(ordinal: usize, is_deterministic: bool) -> Result<Self> {
        if FATBINS.is_empty() {
            return Err(KernelError::NoFatbin);
        }
        // SAFETY: loads libcuda.so, whose initialisers are the vendor's.
        if !unsafe { sys::is_culib_present() } {
            return Err(KernelError::NoDriver { reason: "libcuda.so.1 is not on the library path".into() });
        }
        result::init().map_err(|err| match err.0 {
            sys::CUresult::CUDA_ERROR_NO_DEVICE => KernelError::NoDevice { ordinal, found: 0 },
            _ => KernelError::NoDriver { reason: err.to_string() },
        })?;
        let mut version = 0;
        // SAFETY: writes one integer.
        unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(failed("cuDriverGetVersion"))?;
        if version < OLDEST_DRIVER {
            let reason =
                format!("the driver speaks CUDA {}.{}, at least 13.0 is needed", version / 1000, version % 1000 / 10);
            return Err(KernelError::NoDriver { reason });
        }
        let found = result::device::get_count().map_err(failed("cuDeviceGetCount"))?;
        if ordinal as i64 >= i64::from(found) {
            return Err(KernelError::NoDevice { ordinal, found: found as usize });
        }
        let device = result::device::get(ordinal as i32).map_err(failed("cuDeviceGet"))?;
        let name = result::device::get_name(device).map_err(failed("cuDeviceGetName"))?;
        // SAFETY: `device` is a device; the context is current before the stream is made, and released in `drop`.
        unsafe {
            let attribute =
                |attribute| result::device::get_attribute(device, attribute).map_err(failed("cuDeviceGetAttribute"));
            let num_multiprocessors =
                attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
            let major = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32;
            let minor = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32;
            if !ARCHS.iter().any(|arch| runs_on(arch, major, minor)) {
                return Err(KernelError::OtherGpu { name, major, minor, built: ARCHS.join(", ") });
            }
            let is_hopper = ARCHS.contains(&"90a") && runs_on("90a", major, minor);
            let context = result::primary_ctx::retain(device).map_err(failed("cuDevicePrimaryCtxRetain"))?;
            result::ctx::set_current(context).map_err(failed("cuCtxSetCurrent"))?;
            let stream =
                result::stream::create(result::stream::StreamKind::NonBlocking).map_err(failed("cuStreamCreate"))?;
            let counters = result::malloc_sync(COUNTERS * 4).map_err(failed("cuMemAlloc"))?;
            result::memset_d8_sync(counters, 0, COUNTERS * 4).map_err(failed("cuMemsetD8"))?;
            let parts = match is_deterministic {
                true => {
                    let bytes = num_multiprocessors as usize * PARTS_BYTES;
                    Some(result::malloc_sync(bytes).map_err(failed("cuMemAlloc"))?)
                }
                false => None,
            };
            let (kernels, blas, loading_blas) = (Mutex::default(), OnceLock::new(), Mutex::default());
            let gpu = CudaDevice {
                ordinal,
                name,
                device,
                context,
                stream,
                num_multiprocessors,
                is_hopper,
                kernels,
                blas,
                loading_blas,
                counters,
                parts,
            };
            Ok(gpu)
        }
    }

    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// As the driver names it: `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn num_multiprocessors(&self) -> u32 {
        self.num_multiprocessors
    }

    /// Whether it has Hopper's own instructions: products by four warps, copies of tiles.
    pub(crate) fn is_hopper(&self) -> bool {
        self.is_hopper
    }

    /// Whether a row's results are the same bits whatever other rows there are; see [`Device::cuda_deterministic`](super::Device::cuda_deterministic).
    pub fn is_deterministic(&self) -> bool {
        self.parts.is_some()
    }

    /// Where blocks of one launch leave parts of a product for each other, room for a tile of 128 x 128 in four parts a multiprocessor. Only
    /// of a deterministic device.
    pub(crate) fn parts(&self) -> Option<u64> {
        self.parts
    }

    /// Bytes of device memory: free now, and in all.
    ///
    /// # Errors
    /// `Driver`.
    pub fn memory_bytes(&self) -> Result<(usize, usize)> {
        self.bind()?;
        result::mem_get_info().map_err(failed("cuMemGetInfo"))
    }

    /// Waits for the stream.
    ///
    /// # Errors
    /// `Driver` if any work on it failed.
    pub fn synchronize(&self) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream lives as long as the device.
        unsafe { result::stream::synchronize(self.stream) }.map_err(failed("cuStreamSynchronize"))
    }

    /// Makes this device's context the calling thread's.
    pub(crate) fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained until `drop`.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("cuCtxSetCurrent"))
    }

    pub(crate) fn stream(&self) -> sys::CUstream {
        self.stream
    }

    pub(crate) fn counters(&self) -> u64 {
        self.counters
    }

    /// Puts `y = x weightᵀ` on the stream, by cuBLASLt.
    ///
    /// # Errors
    /// `NoDriver` if the library is absent, `Blas`.
    ///
    /// # Safety
    /// The addresses must hold what the product reads and writes until the stream has passed it.
    pub(crate) unsafe fn blas_matmul(&self, product: Product, x: u64, weight: u64, y: u64) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { self.blas()?.matmul(self, product, x, weight, y) }
    }

    /// The library, loaded at its first use.
    fn blas(&self) -> Result<&blas::Blas> {
        if let Some(blas) = self.blas.get() {
            return Ok(blas);
        }
        let _turn = self.loading_blas.lock().unwrap_or_else(PoisonError::into_inner);
        match self.blas.get() {
            Some(blas) => Ok(blas),
            None => {
                self.bind()?;
                let made = blas::Blas::new()?;
                Ok(self.blas.get_or_init(|| made))
            }
        }
    }

    /// Begins to load the library on a thread of its own: that takes as long as a model of some size does.
    pub(super) fn load_blas_soon(self: &Arc<Self>) {
        let gpu = self.clone();
        // Whatever fails, fails again where the library is used, and is told there.
        let _ = std::thread::Builder::new().name("cublas".into()).spawn(move || drop(gpu.blas().map(|_| ())));
    }

    /// The kernel `name` of `ops/*/source.cu`, loaded at its first use.
    pub(crate) fn function(&self, source: &'static str, name: &'static str) -> Result<Function> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&function) = kernels.functions.get(&(source, name)) {
            return Ok(function);
        }
        self.bind()?;
        let failed =
            |err: result::DriverError| KernelError::NoKernel { op: source, kernel: name, reason: err.to_string() };
        let module = match kernels.modules.get(source) {
            Some(&module) => module,
            None => {
                let (_, fatbin) =
                    FATBINS.iter().find(|(of, _)| *of == source).ok_or_else(|| KernelError::NoKernel {
                        op: source,
                        kernel: name,
                        reason: format!("it is not built for {}", ARCHS.join(", ")),
                    })?;
                // SAFETY: the bytes are a fatbin made by nvcc, which says its own length.
                let module = unsafe { result::module::load_data(fatbin.as_ptr().cast()) }.map_err(failed)?;
                kernels.modules.insert(source, module);
                module
            }
        };
        let c_name = CString::new(name).expect("kernel names have no NUL");
        // SAFETY: the module is loaded and never unloaded.
        let function = unsafe { result::module::get_function(module, c_name) }.map_err(failed)?;
        // SAFETY: the function was just found. Raising the limit costs nothing; a launch still asks for what it needs.
        unsafe {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let mut limit = 0;
            let most = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
            sys::cuDeviceGetAttribute(&mut limit, most, self.device).result().map_err(failed)?;
            let mut own = 0;
            let fixed = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            sys::cuFuncGetAttribute(&mut own, fixed, function).result().map_err(failed)?;
            result::function::set_function_attribute(function, attribute, limit - own).map_err(failed)?;
        }
        kernels.functions.insert((source, name), Function(function));
        Ok(Function(function))
    }
}

/// Whether machine code for `arch` runs on a GPU of this compute capability. A letter behind it binds it to that very one.
fn runs_on(arch: &str, major: u32, minor: u32) -> bool {
    let digits = arch.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let Ok(number) = digits.parse::<u32>() else { return false };
    let same = number % 10 == minor;
    number / 10 == major && if digits == arch { number % 10 <= minor } else { same }
}

/// What `what` failed with. After some failures the context is of no use any more.
fn failed(what: &'static str) -> impl Fn(result::DriverError) -> KernelError {
    use sys::CUresult as Code;
    const LOST: [Code; 9] = [
        Code::CUDA_ERROR_ILLEGAL_ADDRESS,
        Code::CUDA_ERROR_LAUNCH_FAILED,
        Code::CUDA_ERROR_LAUNCH_TIMEOUT,
        Code::CUDA_ERROR_ILLEGAL_INSTRUCTION,
        Code::CUDA_ERROR_MISALIGNED_ADDRESS,
        Code::CUDA_ERROR_HARDWARE_STACK_ERROR,
        Code::CUDA_ERROR_ECC_UNCORRECTABLE,
        Code::CUDA_ERROR_DEVICE_UNAVAILABLE,
        Code::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    ];
    move |source| match LOST.contains(&source.0) {
        true => KernelError::GpuLost { what, source },
        false => KernelError::Driver { what, source },
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cuda:{} ({})", self.ordinal, self.name)
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        let _ = self.synchronize();
        // SAFETY: nothing of this device is in use: tensors hold the device, and the stream is idle. Errors have no one to go to.
        unsafe {
            for scratch in self.parts.into_iter().chain([self.counters]) {
                let _ = result::free_sync(scratch);
            }
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_runs_on_later_gpus_of_its_kind_unless_it_is_bound_to_one() {
        for (arch, major, minor, runs) in [
            ("80", 8, 0, true),
            ("80", 8, 9, true),
            ("89", 8, 0, false),
            ("80", 9, 0, false),
            ("90a", 9, 0, true),
            ("90a", 10, 0, false),
            ("100f", 10, 0, true),
            ("x", 9, 0, false),
        ] {
            assert_eq!(runs_on(arch, major, minor), runs, "{arch} on {major}.{minor}");
        }
    }

    #[test]
    fn a_gpu_that_has_failed_is_told_from_a_call_that_has() {
        let said = |code| failed("cuEventSynchronize")(result::DriverError(code)).to_string();
        assert_eq!(
            said(sys::CUresult::CUDA_ERROR_ECC_UNCORRECTABLE),
            "the GPU is lost: cuEventSynchronize failed, and nothing on it can be used until the process starts again"
        );
        assert_eq!(said(sys::CUresult::CUDA_ERROR_INVALID_VALUE), "cuEventSynchronize failed");
    }
}
