//! Pairs of tokens and experts, sorted by expert.

use super::{Groups, cuda};
use crate::device::Device;
use crate::dtype::DType;
use crate::error::{KernelError, Result};
use crate::tensor::Tensor;

const OP: &str = "moe_permute";

/// Sorts pairs by their experts; those of one expert keep their order.
///
/// | argument | shape             | dtype | |
/// |----------|-------------------|-------|-|
/// | `ids`    | `[tokens, top_k]` | i32   | read: experts |
/// | `groups` | of as many tokens | i32   | written |
///
/// # Errors
/// `Shape` or `DType` if arguments do not agree; on the CPU also `Value` if an id is no expert, which on a GPU counts as the last.
pub fn permute(ids: &Tensor, groups: &mut Groups) -> Result<()> {
    check(ids, groups)?;
    let num_experts = groups.num_experts();
    if let Device::Cuda(device) = ids.device() {
        return cuda::permute(device, ids, groups);
    }
    let ids = ids.as_slice::<i32>();
    if let Some(&id) = ids.iter().find(|&&id| usize::try_from(id).map_or(true, |id| id >= num_experts)) {
        return Err(KernelError::Value { op: OP, arg: "id", got: i64::from(id), want: "an expert" });
    }
    let offsets = groups.offsets.as_mut_slice::<i32>();
    let (pairs, places) = (groups.pairs.as_mut_slice::<i32>(), groups.places.as_mut_slice::<i32>());
    offsets.fill(0);
    for &id in ids {
        offsets[id as usize + 1] += 1;
    }
    for expert in 0..num_experts {
        offsets[expert + 1] += offsets[expert];
    }
    // Each expert's offset runs from its begin to its end, which is the next one's begin.
    for (pair, &id) in ids.iter().enumerate() {
        let place = &mut offsets[id as usize];
        pairs[*place as usize] = pair as i32;
        places[pair] = *place;
        *place += 1;
    }
    offsets.copy_within(0..num_experts, 1);
    offsets[0] = 0;
    Ok(())
}

pub(super) fn check(ids: &Tensor, groups: &Groups) -> Result<()> {
    let (tokens, top_k) = ids.rows_cols();
    ids.expect_dtype(OP, "ids", DType::I32)?;
    ids.expect_shape(OP, "ids", [tokens, groups.top_k])?;
    groups.pairs.expect_shape(OP, "pairs", [tokens * top_k])?;
    groups.places.expect_shape(OP, "places", [tokens * top_k])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Workspace;

    fn permuted(ids: &[i32], top_k: usize, num_experts: usize) -> Result<Groups> {
        let tokens = ids.len() / top_k;
        let workspace = Workspace::new(&Device::Cpu, Groups::bytes(tokens, top_k, num_experts)).unwrap();
        let ids = Tensor::from_slice(&Device::Cpu, "ids", ids, [tokens, top_k]).unwrap();
        let mut groups = Groups::take(&workspace, tokens, top_k, num_experts).unwrap();
        permute(&ids, &mut groups).map(|()| groups)
    }

    #[test]
    fn pairs_stand_by_expert_in_their_own_order() {
        let groups = permuted(&[2, 0, 2, 3, 0, 2], 2, 5).unwrap();
        assert_eq!(groups.pairs.as_slice::<i32>(), [1, 4, 0, 2, 5, 3]);
        assert_eq!(groups.places.as_slice::<i32>(), [2, 0, 3, 5, 1, 4]);
        assert_eq!(groups.offsets.as_slice::<i32>(), [0, 2, 2, 5, 6, 6]);
    }

    #[test]
    fn none_are_none() {
        assert_eq!(permuted(&[], 2, 3).unwrap().offsets.as_slice::<i32>(), [0; 4]);
    }

    #[test]
    fn an_id_that_is_no_expert_is_named() {
        for id in [-1, 5] {
            let err = permuted(&[0, id], 2, 5).unwrap_err();
            assert_eq!(err.to_string(), format!("moe_permute: id is {id}, expected an expert"));
        }
    }
}
