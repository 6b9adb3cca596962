//! Token embedding: rows of a table.

mod cpu;
mod cuda;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;
use crate::with_float;

const OP: &str = "embed";

/// `y[t] = table[ids[t]]`.
///
/// | argument | shape              | dtype       | |
/// |----------|--------------------|-------------|-|
/// | `table`  | `[vocab, hidden]`  | f32 or bf16 | read |
/// | `ids`    | `[tokens]`         | i32         | read |
/// | `y`      | `[tokens, hidden]` | f32 or bf16, not necessarily the table's | written |
///
/// # Errors
/// `Shape`, `DType`, and `Value` if an id is outside the table; nothing is then written. A GPU does not look at ids
/// beforehand: there such an id yields a row of zeros.
pub fn embed(table: &Tensor, ids: &Tensor, y: &mut Tensor) -> Result<()> {
    let (vocab, hidden) = table.rows_cols();
    let (num_tokens, _) = y.rows_cols();
    table.expect_shape(OP, "table", [vocab, hidden])?;
    ids.expect_dtype(OP, "ids", DType::I32)?;
    ids.expect_shape(OP, "ids", [num_tokens])?;
    y.expect_shape(OP, "y", [num_tokens, hidden])?;
    match table.device() {
        Device::Cpu => {
            let ids = ids.as_slice::<i32>();
            if let Some(&id) = ids.iter().find(|&&id| id < 0 || id as usize >= vocab) {
                return Err(KernelError::Value { op: OP, arg: "ids", got: id.into(), want: "a row of the table" });
            }
            with_float!(OP, "table", table.dtype(), W => with_float!(OP, "y", y.dtype(), T => {
                cpu::embed::<W, T>(table.as_slice(), ids, y.as_mut_slice(), hidden);
            }));
        }
        Device::Cuda(device) => cuda::embed(device, table, ids, y)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn rows_are_found_by_id_and_rounded_to_the_dtype_of_y() {
        let table = Tensor::from_slice(&Device::Cpu, "table", &[1.0f32, 2.0, 3.0, 4.001, 5.0, 6.0], [3, 2]).unwrap();
        let ids = Tensor::from_slice(&Device::Cpu, "ids", &[2, 1, 2], [3]).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, "y", [3, 2], DType::F32).unwrap();
        embed(&table, &ids, &mut y).unwrap();
        assert_eq!(y.as_slice::<f32>(), [5.0, 6.0, 3.0, 4.001, 5.0, 6.0]);

        let mut y = Tensor::zeros(&Device::Cpu, "y", [3, 2], DType::BF16).unwrap();
        embed(&table, &ids, &mut y).unwrap();
        assert_eq!(y.as_slice::<bf16>(), [5.0, 6.0, 3.0, 4.0, 5.0, 6.0].map(bf16::from_f32));
    }

    #[test]
    fn an_id_outside_the_table_is_named() {
        let table = Tensor::zeros(&Device::Cpu, "table", [3, 2], DType::BF16).unwrap();
        let mut y = Tensor::zeros(&Device::Cpu, "y", [2, 2], DType::F32).unwrap();
        for bad in [3, -1] {
            let ids = Tensor::from_slice(&Device::Cpu, "ids", &[0, bad], [2]).unwrap();
            let err = embed(&table, &ids, &mut y).unwrap_err();
            assert_eq!(err.to_string(), format!("embed: ids is {bad}, expected a row of the table"));
        }
    }
}
