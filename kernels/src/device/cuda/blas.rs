//! cuBLASLt for products of many rows, its plans made once per shape.
//!
//! The library proposes algorithms in the order that it believes in. Of those that add in the same order as its first, and so give the
//! same bits, the one that is measured to be fastest is taken, once for each doubling of rows: the bits of a run do not hang on the clock.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};
use cudarc::driver::result as driver_result;
use cudarc::driver::sys::CUevent_flags;

use super::CudaDevice;
use crate::dtype::DType;
use crate::error::{KernelError, Result};

/// Scratch that a plan may use; what NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Proposals that are looked at.
const PROPOSALS: usize = 6;

/// Of the first one's time, what another must do with to be taken.
const CLEARLY_FASTER: f32 = 0.98;

/// How often each is timed; the shortest counts.
const TIMES: usize = 3;

/// Weights that are worth choosing for.
const MANY_BYTES: usize = 16 << 20;

/// Written before each timing of few rows, so that weights come from memory as they do in a model; more than the L2 of a card.
const FLUSHED_BYTES: usize = 128 << 20;
/// More rows than this hide where their weights come from.
const FEW_ROWS: usize = 512;

/// The library's handle, its scratch, and one plan per shape.
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    workspace: u64,
    plans: Mutex<Plans>,
}

#[derive(Default)]
struct Plans {
    by_shape: HashMap<Product, Plan>,
    /// By the next power of two of the rows.
    chosen: HashMap<Product, sys::cublasLtMatmulAlgo_t>,
}

/// `y[rows, out] = x[rows, in] weight[out, in]ᵀ`, x and weight bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Product {
    pub rows: usize,
    pub out: usize,
    pub inner: usize,
    pub y: DType,
}

/// The library's descriptors live as long as the process: there are as many as shapes, a few dozen.
#[derive(Clone, Copy)]
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Blas {
    pub(super) fn new() -> Result<Self> {
        // SAFETY: loads libcublasLt.so, whose initialisers are the vendor's.
        if !unsafe { sys::is_culib_present() } {
            return Err(KernelError::NoDriver { reason: "libcublasLt.so.13 is not on the library path".into() });
        }
        let handle = result::create_handle().map_err(failed("cublasLtCreate"))?;
        // SAFETY: the context is current; the scratch is never freed before the context is.
        let workspace = unsafe { driver_result::malloc_sync(WORKSPACE_BYTES) }
            .map_err(|_| KernelError::OutOfMemory { what: "cuBLASLt", wanted: WORKSPACE_BYTES, free: 0 })?;
        Ok(Blas { handle, workspace, plans: Mutex::default() })
    }

    /// Puts the product on the device's stream. The first of a shape may take a while.
    ///
    /// # Errors
    /// `Blas`.
    ///
    /// # Safety
    /// The addresses must hold what the product reads and writes until the stream has passed it.
    pub(super) unsafe fn matmul(
        &self,
        device: &CudaDevice,
        product: Product,
        x: u64,
        weight: u64,
        y: u64,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            let plan = self.plan(device, product, [x, weight, y])?;
            self.run(device, &plan, &plan.algorithm, [x, weight, y])
        }
    }

    /// # Safety
    /// As [`matmul`](Self::matmul); `plan` is of the shape that the addresses hold.
    unsafe fn run(
        &self,
        device: &CudaDevice,
        plan: &Plan,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        [x, weight, y]: [u64; 3],
    ) -> Result<()> {
        let (one, zero) = (1.0f32, 0.0f32);
        // SAFETY: the plan's layouts describe the addresses, which the caller vouches for.
        unsafe {
            result::matmul(
                self.handle,
                plan.product,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                weight as *const c_void,
                plan.weight,
                x as *const c_void,
                plan.x,
                y as *const c_void,
                plan.y,
                y as *mut c_void,
                plan.y,
                algorithm,
                self.workspace as *mut c_void,
                WORKSPACE_BYTES,
                device.stream().cast(),
            )
        }
        .map_err(failed("cublasLtMatmul"))
    }

    /// # Safety
    /// As [`matmul`](Self::matmul).
    unsafe fn plan(&self, device: &CudaDevice, product: Product, at: [u64; 3]) -> Result<Plan> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&plan) = plans.by_shape.get(&product) {
            return Ok(plan);
        }
        let (mut plan, proposals) = self.propose(product)?;
        let class = Product { rows: product.rows.next_power_of_two(), ..product };
        plan.algorithm = match plans.chosen.get(&class) {
            Some(chosen) if self.takes(&plan, chosen) => *chosen,
            Some(_) => plan.algorithm,
            None => {
                // SAFETY: the caller's promise.
                let chosen = unsafe { self.fastest(device, product, &plan, &proposals, at)? };
                plans.chosen.insert(class, chosen);
                chosen
            }
        };
        plans.by_shape.insert(product, plan);
        Ok(plan)
    }

    /// A plan with the first of the algorithms that give the same bits, and all of these. The library counts columns first, so it is told
    /// yᵀ = weight xᵀ with every matrix read as its transpose.
    fn propose(&self, product: Product) -> Result<(Plan, Vec<sys::cublasLtMatmulAlgo_t>)> {
        use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let Product { rows, out, inner, y } = product;
        let (bf16, f32) = (sys::cudaDataType::CUDA_R_16BF, sys::cudaDataType::CUDA_R_32F);
        let y_type = if y == DType::F32 { f32 } else { bf16 };
        let layout = |kind, rows: usize, columns: usize| {
            result::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64)
                .map_err(failed("cublasLtMatrixLayoutCreate"))
        };
        let product = result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, f32)
            .map_err(failed("cublasLtMatmulDescCreate"))?;
        let (weight, x, y) = (layout(bf16, inner, out)?, layout(bf16, inner, rows)?, layout(y_type, out, rows)?);
        /// `CUBLAS_OP_T`.
        const TRANSPOSED: i32 = 1;
        let (transposed, workspace_bytes) = (TRANSPOSED, WORKSPACE_BYTES);
        let preference = result::create_matmul_pref().map_err(failed("cublasLtMatmulPreferenceCreate"))?;
        let mut found = [MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit(); PROPOSALS];
        let mut num_found = 0;
        // SAFETY: each attribute is given a value of its type, which the library copies; it writes as many proposals as it says.
        let found = unsafe {
            let at = (&raw const transposed).cast();
            result::set_matmul_desc_attribute(product, CUBLASLT_MATMUL_DESC_TRANSA, at, size_of::<i32>())
                .map_err(failed("cublasLtMatmulDescSetAttribute"))?;
            let at = (&raw const workspace_bytes).cast();
            result::set_matmul_pref_attribute(
                preference,
                CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                at,
                size_of::<usize>(),
            )
            .map_err(failed("cublasLtMatmulPreferenceSetAttribute"))?;
            let answer = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                product,
                weight,
                x,
                y,
                y,
                preference,
                PROPOSALS as i32,
                found.as_mut_ptr().cast(),
                &mut num_found,
            );
            let _ = result::destroy_matmul_pref(preference);
            answer.result().map_err(failed("cublasLtMatmulAlgoGetHeuristic"))?;
            found[..num_found as usize].iter().map(|found| found.assume_init()).collect::<Vec<_>>()
        };
        let works = |found: &sys::cublasLtMatmulHeuristicResult_t| found.state.result().is_ok();
        let mut algorithms: Vec<_> = found.into_iter().filter(works).map(|found| found.algo).collect();
        let none = result::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED);
        let first = *algorithms.first().ok_or(none).map_err(failed("cublasLtMatmulAlgoGetHeuristic"))?;
        algorithms.retain(|algorithm| order(algorithm) == order(&first));
        Ok((Plan { product, weight, x, y, algorithm: first }, algorithms))
    }

    /// Whether an algorithm chosen for other rows is one for these.
    fn takes(&self, plan: &Plan, algorithm: &sys::cublasLtMatmulAlgo_t) -> bool {
        let Plan { product, weight, x, y, .. } = *plan;
        let mut checked = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit();
        // SAFETY: the library writes its answer, which is read only if it says that it did.
        unsafe {
            let answer =
                sys::cublasLtMatmulAlgoCheck(self.handle, product, weight, x, y, y, algorithm, checked.as_mut_ptr());
            answer.result().is_ok() && checked.assume_init().workspaceSize <= WORKSPACE_BYTES
        }
    }

    /// The algorithm that is clearly the fastest of those proposed, or else the first.
    ///
    /// # Safety
    /// As [`matmul`](Self::matmul).
    unsafe fn fastest(
        &self,
        device: &CudaDevice,
        product: Product,
        plan: &Plan,
        proposals: &[sys::cublasLtMatmulAlgo_t],
        at: [u64; 3],
    ) -> Result<sys::cublasLtMatmulAlgo_t> {
        let driver = super::failed;
        if proposals.len() < 2 || 2 * product.out * product.inner < MANY_BYTES {
            return Ok(plan.algorithm);
        }
        let flushed = if product.rows <= FEW_ROWS { FLUSHED_BYTES } else { 0 };
        // SAFETY: what is flushed was just allocated, and is freed once the stream has passed it; the rest is the caller's promise.
        unsafe {
            let Ok(scratch) = driver_result::malloc_sync(flushed.max(1)) else { return Ok(plan.algorithm) };
            let timed = || -> Result<Vec<f32>> {
                let event =
                    || driver_result::event::create(CUevent_flags::CU_EVENT_DEFAULT).map_err(driver("cuEventCreate"));
                let (begin, end) = (event()?, event()?);
                let mut times = vec![f32::INFINITY; proposals.len()];
                for (algorithm, least) in proposals.iter().zip(&mut times) {
                    // The first run loads it.
                    if self.run(device, plan, algorithm, at).is_err() {
                        continue;
                    }
                    for _ in 0..TIMES {
                        driver_result::memset_d8_async(scratch, 0, flushed.max(1), device.stream())
                            .map_err(driver("cuMemsetD8Async"))?;
                        driver_result::event::record(begin, device.stream()).map_err(driver("cuEventRecord"))?;
                        self.run(device, plan, algorithm, at)?;
                        driver_result::event::record(end, device.stream()).map_err(driver("cuEventRecord"))?;
                        driver_result::event::synchronize(end).map_err(driver("cuEventSynchronize"))?;
                        let millis = driver_result::event::elapsed(begin, end).map_err(driver("cuEventElapsedTime"))?;
                        *least = least.min(millis);
                    }
                }
                driver_result::event::destroy(begin).map_err(driver("cuEventDestroy"))?;
                driver_result::event::destroy(end).map_err(driver("cuEventDestroy"))?;
                Ok(times)
            };
            let times = timed();
            device.synchronize()?;
            driver_result::free_sync(scratch).map_err(driver("cuMemFree"))?;
            let times = times?;
            let best = (0..times.len()).min_by(|&a, &b| times[a].total_cmp(&times[b])).unwrap_or(0);
            Ok(proposals[if times[best] < CLEARLY_FASTER * times[0] { best } else { 0 }])
        }
    }
}

/// What decides the order that products are added in: the parts that `in` is cut into, and how these are put together.
fn order(algorithm: &sys::cublasLtMatmulAlgo_t) -> [u32; 2] {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let read = |attribute| {
        let (mut value, mut written) = (0u32, 0);
        // SAFETY: both attributes are 4 bytes; a failure leaves the 0.
        let _ = unsafe {
            let to = (&raw mut value).cast();
            sys::cublasLtMatmulAlgoConfigGetAttribute(algorithm, attribute, to, size_of::<u32>(), &mut written)
        };
        value
    };
    [read(Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM), read(Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME)]
}

fn failed(what: &'static str) -> impl Fn(result::CublasError) -> KernelError {
    move |source| KernelError::Blas { what, source }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::device::Device;
    use crate::testing::{gpu, random, rng, tensor};

    #[test]
    #[ignore = "needs a GPU"]
    fn every_algorithm_that_may_be_chosen_gives_the_same_bits() {
        let (gpu, mut rng) = (gpu(), rng(21));
        let Device::Cuda(device) = &gpu else { unreachable!("gpu() returns one") };
        let blas = device.blas().unwrap();
        let mut most = 0;
        for (out, inner) in [(6144, 4096), (4096, 4096), (4096, 14_336), (960, 576)] {
            let weight = tensor(&gpu, &random(&mut rng, out * inner, 1.0), [out, inner]);
            for rows in [16, 48, 128, 1000] {
                let x = tensor(&gpu, &random(&mut rng, rows * inner, 1.0), [rows, inner]);
                let (plan, proposals) = blas.propose(Product { rows, out, inner, y: DType::BF16 }).unwrap();
                most = most.max(proposals.len());
                let run = |algorithm| {
                    let y = tensor(&gpu, &vec![bf16::NAN; rows * out], [rows, out]);
                    let at = [&x, &weight, &y].map(|tensor| tensor.device_address());
                    // SAFETY: the tensors have the plan's shapes and outlive the copy that follows.
                    unsafe { blas.run(device, &plan, algorithm, at).unwrap() };
                    y.to_vec::<bf16>().unwrap()
                };
                let want = run(&proposals[0]);
                for (number, algorithm) in proposals.iter().enumerate() {
                    assert!(
                        run(algorithm) == want,
                        "{rows} x {out} x {inner}: proposal {number} of {}",
                        proposals.len()
                    );
                }
            }
        }
        assert!(most > 1, "there was nothing to choose from");
    }
}
