//! From the tokens of a draft vocabulary to those of the model's, on the device: the next draft may then be made of them.

mod cuda;

use crate::device::Device;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

const OP: &str = "map_tokens";

/// `out[i] = table[ids[i]]`, or `ids[i]` without a table. What is no row of the table gives 0, and so does `-1`, no token.
///
/// | argument | shape    | dtype | |
/// |----------|----------|-------|-|
/// | `ids`    | `[n]`    | i32   | read |
/// | `table`  | `[rows]` | i32   | read |
/// | `out`    | `[n]`    | i32   | written |
///
/// # Errors
/// `DType`, `Shape`, `Launch`.
pub fn map_tokens(ids: &Tensor, table: Option<&Tensor>, out: &mut Tensor) -> Result<()> {
    let n = ids.shape().num_elements();
    for (arg, tensor) in [("ids", Some(ids)), ("table", table), ("out", Some(&*out))] {
        let Some(tensor) = tensor else { continue };
        tensor.expect_dtype(OP, arg, DType::I32)?;
        let len = if arg == "table" { tensor.shape().num_elements() } else { n };
        tensor.expect_shape(OP, arg, [len])?;
    }
    match ids.device().clone() {
        Device::Cpu => {
            let table = table.map(Tensor::as_slice::<i32>);
            for (out, &id) in out.as_mut_slice::<i32>().iter_mut().zip(ids.as_slice::<i32>()) {
                *out = match (usize::try_from(id), table) {
                    (Ok(row), Some(table)) => table.get(row).copied().unwrap_or(0),
                    (Ok(_), None) => id,
                    (Err(_), _) => 0,
                };
            }
            Ok(())
        }
        Device::Cuda(device) => cuda::map_tokens(&device, ids, table, out),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_become_what_stands_in_their_row() {
        let vector = |values: &[i32]| Tensor::from_slice(&Device::Cpu, "v", values, [values.len()]).unwrap();
        let (ids, table) = (vector(&[2, 0, -1, 3, 1]), vector(&[70, 80, 90]));
        let mut out = vector(&[-7; 5]);
        map_tokens(&ids, Some(&table), &mut out).unwrap();
        assert_eq!(out.as_slice::<i32>(), [90, 70, 0, 0, 80]);
        map_tokens(&ids, None, &mut out).unwrap();
        assert_eq!(out.as_slice::<i32>(), [2, 0, 0, 3, 1]);
    }
}
