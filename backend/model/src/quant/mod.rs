//! How weights are stored and multiplied: the table of schemes.

mod awq;
mod bf16;
mod block_fp8;
mod columns;
mod gguf_blocks;
mod gptq;
mod kernel;
mod scheme;
mod search;
mod stream;
mod weight_only_int4;
mod weight_only_int8;

use bf16::Unquantized;
use block_fp8::BlockFp8;
use gguf_blocks::GgufBlocks;
pub use scheme::{Activation, ActivationFormat, Part, QuantScheme, QuantWeight, SpreadNorm};
use weight_only_int4::WeightOnlyInt4;
use weight_only_int8::WeightOnlyInt8;

use crate::config::StoredQuantization;
use crate::error::{ModelError, Result};

/// What an operator asks for: quantize the weights while they load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantType {
    /// As in the table below.
    pub name: String,
    /// Neighbouring inputs that share one scale, -1 for all of a row; `None` for the scheme's default.
    pub group_size: Option<i64>,
}

impl From<String> for QuantType {
    fn from(name: String) -> Self {
        QuantType { name, group_size: None }
    }
}

impl From<&str> for QuantType {
    fn from(name: &str) -> Self {
        QuantType::from(name.to_owned())
    }
}

/// Inputs that share one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupSize {
    /// All of a row: one scale an output channel.
    Channel,
    Of(usize),
    /// The first of these that divides a row, else all of it.
    Fitting(&'static [usize]),
    /// As `Fitting`, with one list for rows of at least `from` inputs and one for shorter.
    ByRow {
        from: usize,
        long: &'static [usize],
        short: &'static [usize],
    },
}

impl GroupSize {
    /// What `-1`, `32`, `64` and `128` stand for.
    ///
    /// # Errors
    /// `Setting` for any other number.
    pub fn new(size: i64) -> Result<Self> {
        match size {
            -1 => Ok(GroupSize::Channel),
            32 | 64 | 128 => Ok(GroupSize::Of(size as usize)),
            other => Err(ModelError::Setting {
                setting: "weightonly_group_size",
                value: other.to_string(),
                supported: "-1 (a whole row), 32, 64, 128",
            }),
        }
    }

    /// Elements of one group in a layer's rows of `inputs`.
    ///
    /// # Errors
    /// `NotMultiple`, naming the layer, if groups do not fill a row.
    pub fn checked(self, layer: &str, inputs: usize) -> Result<usize> {
        let fitting =
            |sizes: &[usize]| sizes.iter().copied().find(|&size| inputs.is_multiple_of(size)).unwrap_or(inputs);
        match self {
            GroupSize::Channel => Ok(inputs),
            GroupSize::Fitting(sizes) => Ok(fitting(sizes)),
            GroupSize::ByRow { from, long, short } => Ok(fitting(if inputs < from { short } else { long })),
            GroupSize::Of(size) if inputs.is_multiple_of(size) => Ok(size),
            GroupSize::Of(of) => {
                let (name, what, why) = (layer.to_owned(), "in", "the quantization group");
                Err(ModelError::NotMultiple { name, what, size: inputs, of, why })
            }
        }
    }
}

/// The schemes of a model's layers.
///
/// | layers                                  | as stored | quantized at load       | stored quantized |
/// |-----------------------------------------|-----------|-------------------------|------------------|
/// | linear layers of attention and MLPs     | `none`    | the scheme asked for    | `quant_method`   |
/// | experts, routed and shared              | `none`    | the scheme asked for    | `quant_method`   |
/// | head, also as a tied embedding table    | `none`    | int8, groups of 32      | `quant_method`, unless it was left out |
/// | embedding table of its own              | `none`    | `none`                  | `quant_method`, unless it was left out |
/// | routers, gates of shared experts        | `none`    | `none`                  | `none`           |
/// | norms, biases, correction biases        | f32       | f32                     | f32              |
/// | expansion of latents (`kv_b_proj`)      | floats    | floats                  | floats, of what is stored |
pub(crate) struct Schemes {
    /// Of linear layers and experts.
    pub(crate) linear: Box<dyn QuantScheme>,
    /// The head, and the embedding table if it is the same.
    pub(crate) head: Box<dyn QuantScheme>,
    /// An embedding table of its own.
    pub(crate) embedding: Box<dyn QuantScheme>,
    /// Of routers: a rounded one would choose other experts.
    pub(crate) router: Box<dyn QuantScheme>,
    /// Of what is multiplied in two ways, the latents' expansion: never quantized at load.
    pub(crate) floats: Box<dyn QuantScheme>,
}

impl Schemes {
    fn new(linear: Box<dyn QuantScheme>, head: Box<dyn QuantScheme>, embedding: Box<dyn QuantScheme>) -> Self {
        Schemes { linear, head, embedding, router: Box::new(Unquantized), floats: Box::new(Unquantized) }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.linear.name()
    }
}

/// Quantized at load.
const AT_LOAD: [(&str, fn(Option<i64>) -> Result<Schemes>); 3] =
    [("none", unquantized), (WeightOnlyInt8::NAME, weight_only_int8), (WeightOnlyInt4::NAME, weight_only_int4)];

/// Quantized in the checkpoint: `quant_method`.
const STORED: [(&str, fn(&StoredQuantization) -> Result<Schemes>); 4] = [
    (GgufBlocks::NAME, |stored| stored_as(|| GgufBlocks::new(stored))),
    (BlockFp8::NAME, |stored| stored_as(|| BlockFp8::new(stored))),
    (awq::NAME, |stored| stored_as(|| awq::scheme(stored))),
    (gptq::NAME, |stored| stored_as(|| gptq::scheme(stored))),
];

/// One scheme for all layers: what a checkpoint has left unquantized it loads as that.
fn stored_as<S: QuantScheme + 'static>(scheme: impl Fn() -> Result<S>) -> Result<Schemes> {
    let scheme = || scheme().map(|scheme| Box::new(scheme) as Box<dyn QuantScheme>);
    Ok(Schemes { floats: scheme()?, ..Schemes::new(scheme()?, scheme()?, scheme()?) })
}

fn unquantized(_: Option<i64>) -> Result<Schemes> {
    stored_as(|| Ok(Unquantized))
}

/// Groups of 32 where these fill a row, unless a size is asked for. One scale a channel (-1) loses too much on small models: on
/// SmolLM2-135M a KL divergence of 4e-3 against under 2e-3.
fn weight_only_int8(group_size: Option<i64>) -> Result<Schemes> {
    let group = group_size.map_or(Ok(GroupSize::Fitting(&[32])), GroupSize::new)?;
    Ok(Schemes::new(Box::new(WeightOnlyInt8 { group }), int8_head(), Box::new(Unquantized)))
}

/// Groups of 128, or fewer where these do not fill a row, unless a size is asked for. Short rows get 32: a small model has nothing
/// that would even out the errors of larger groups, and its scales cost little.
fn weight_only_int4(group_size: Option<i64>) -> Result<Schemes> {
    let group =
        group_size.map_or(Ok(GroupSize::ByRow { from: 2048, long: &[128, 64, 32], short: &[32] }), GroupSize::new)?;
    Ok(Schemes::new(Box::new(WeightOnlyInt4 { group }), int8_head(), Box::new(Unquantized)))
}

/// The head keeps 8 bits and small groups: it is one layer of many, and no later one can even out its errors. Tied, it is the
/// embedding table too, whose rows have outliers.
fn int8_head() -> Box<dyn QuantScheme> {
    Box::new(WeightOnlyInt8 { group: GroupSize::Fitting(&[32]) })
}

/// The schemes for a checkpoint stored as `stored` says, of which `wanted` is asked.
///
/// # Errors
/// `UnknownQuantization`, naming the table; `AlreadyQuantized`; `Setting` for a group size.
pub(crate) fn schemes(wanted: Option<&QuantType>, stored: Option<&StoredQuantization>) -> Result<Schemes> {
    let wanted = wanted.filter(|wanted| wanted.name != "none");
    match (wanted, stored) {
        (None, None) => unquantized(None),
        (None, Some(stored)) => match find(&STORED, &stored.method) {
            Ok(make) => make(stored),
            Err(ModelError::UnknownQuantization { name, supported }) => {
                Err(stored.refuse("quant_method", &name, &supported))
            }
            Err(other) => Err(other),
        },
        (Some(wanted), None) => find(&AT_LOAD, &wanted.name)?(wanted.group_size),
        (Some(wanted), Some(stored)) => {
            Err(ModelError::AlreadyQuantized { stored: stored.method.clone(), wanted: wanted.name.clone() })
        }
    }
}

fn find<T: Copy>(table: &[(&str, T)], name: &str) -> Result<T> {
    let found = table.iter().find(|(known, _)| *known == name).map(|&(_, make)| make);
    found.ok_or_else(|| {
        let supported = table.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
        ModelError::UnknownQuantization { name: name.to_owned(), supported }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(wanted: Option<&str>, stored: Option<&str>) -> String {
        let stored = stored.map(|method| StoredQuantization {
            method: method.into(),
            group_size: Some(32),
            ..StoredQuantization::default()
        });
        match schemes(wanted.map(QuantType::from).as_ref(), stored.as_ref()) {
            Ok(schemes) => schemes.name().to_owned(),
            Err(err) => err.to_string(),
        }
    }

    #[test]
    fn a_scheme_is_found_by_name_or_refused_with_the_table() {
        assert_eq!(refusal(None, None), "none");
        assert_eq!(refusal(Some("none"), Some("gguf_blocks")), "gguf_blocks");
        assert_eq!(refusal(Some("weight_only_int8"), None), "weight_only_int8");
        assert_eq!(
            refusal(Some("int3"), None),
            "quantization int3 is unknown, supported: none, weight_only_int8, weight_only_int4"
        );
        assert_eq!(refusal(None, Some("awq")), "awq");
        assert_eq!(
            refusal(None, Some("aqlm")),
            "config.json: quantization_config.quant_method is aqlm, supported: gguf_blocks, fp8, awq, gptq"
        );
        assert_eq!(
            refusal(Some("weight_only_int8"), Some("gguf_blocks")),
            "the checkpoint is quantized as gguf_blocks, it cannot be quantized again as weight_only_int8"
        );
        assert_eq!(
            GroupSize::new(48).unwrap_err().to_string(),
            "weightonly_group_size is 48, supported: -1 (a whole row), 32, 64, 128"
        );
    }

    #[test]
    fn a_group_that_does_not_divide_is_refused_and_the_default_gives_way() {
        let within = |group: GroupSize, inputs| match group.checked("layer", inputs) {
            Ok(size) => size.to_string(),
            Err(err) => err.to_string(),
        };
        let default = GroupSize::ByRow { from: 1024, long: &[128, 64, 32], short: &[32] };
        assert_eq!(within(default, 1536), "128");
        assert_eq!(within(default, 1600), "64");
        assert_eq!(within(default, 576), "32");
        assert_eq!(within(default, 80), "80");
        assert_eq!(within(GroupSize::new(-1).unwrap(), 576), "576");
        let refused = "layer: in is 576, not a multiple of 128 (the quantization group)";
        assert_eq!(within(GroupSize::new(128).unwrap(), 576), refused);
    }
}
