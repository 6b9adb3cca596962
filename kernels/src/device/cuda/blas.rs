//! cuBLASLt for products of many rows, its plans made once per shape.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};
use cudarc::driver::result as driver;

use super::CudaDevice;
use crate::dtype::DType;
use crate::error::{KernelError, Result};

/// Scratch that a plan may use; what NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// The library's handle, its scratch, and one plan per shape.
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    workspace: u64,
    plans: Mutex<HashMap<Product, Plan>>,
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
        let workspace = unsafe { driver::malloc_sync(WORKSPACE_BYTES) }.map_err(|_| KernelError::OutOfMemory {
            what: "cuBLASLt",
            wanted: WORKSPACE_BYTES,
            free: 0,
        })?;
        Ok(Blas { handle, workspace, plans: Mutex::default() })
    }

    /// Puts the product on the device's stream.
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
        let plan = self.plan(product)?;
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
                &raw const plan.algorithm,
                self.workspace as *mut c_void,
                WORKSPACE_BYTES,
                device.stream().cast(),
            )
        }
        .map_err(failed("cublasLtMatmul"))
    }

    fn plan(&self, product: Product) -> Result<Plan> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&plan) = plans.get(&product) {
            return Ok(plan);
        }
        let plan = self.make_plan(product)?;
        plans.insert(product, plan);
        Ok(plan)
    }

    /// The library counts columns first, so it is told yᵀ = weight xᵀ with every matrix read as its transpose.
    fn make_plan(&self, Product { rows, out, inner, y }: Product) -> Result<Plan> {
        use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
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
        // SAFETY: each attribute is given a value of its type, which the library copies.
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
            let found = result::get_matmul_algo_heuristic(self.handle, product, weight, x, y, y, preference);
            let _ = result::destroy_matmul_pref(preference);
            found.map_err(failed("cublasLtMatmulAlgoGetHeuristic"))?
        };
        Ok(Plan { product, weight, x, y, algorithm: found.algo })
    }
}

fn failed(what: &'static str) -> impl Fn(result::CublasError) -> KernelError {
    move |source| KernelError::Blas { what, source }
}
