//! Types of the tensors of a quantised model: the mixes of `llama-quantize`, whose users know
//! `Q4_K_M` by its size and quality, so the same names choose the same types here.
//!
//! The tensors whose errors matter most get more bits: the output matrix, and in the `_M` mixes the
//! value projections and `ffn_down` of the first, the last and every third layer. llama.cpp's
//! exceptions for Falcon are left out.

use super::formats::DType;

/// The type of a whole file: one name for a mix of tensor types, numbered as in
/// `general.file_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(non_camel_case_types, missing_docs)] // the field's own names
#[non_exhaustive]
pub enum FileType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q8_0 = 7,
    Q5_0 = 8,
    Q5_1 = 9,
    Q2_K = 10,
    Q3_K_S = 11,
    Q3_K_M = 12,
    Q3_K_L = 13,
    Q4_K_S = 14,
    Q4_K_M = 15,
    Q5_K_S = 16,
    Q5_K_M = 17,
    Q6_K = 18,
    IQ2_XXS = 19,
    IQ2_XS = 20,
    Q2_K_S = 21,
    IQ3_XS = 22,
    IQ3_XXS = 23,
    IQ1_S = 24,
    IQ4_NL = 25,
    IQ3_S = 26,
    IQ3_M = 27,
    IQ2_S = 28,
    IQ2_M = 29,
    IQ4_XS = 30,
    IQ1_M = 31,
    BF16 = 32,
    TQ1_0 = 36,
    TQ2_0 = 37,
    MXFP4_MOE = 38,
    NVFP4 = 39,
    Q1_0 = 40,
    Q2_0 = 41,
}

/// Properties of a model, beside the tensor itself, that decide a tensor's type.
#[derive(Clone, Copy, Debug)]
pub struct ModelShape {
    /// Number of layers (blocks).
    pub n_layer: usize,
    /// Query heads.
    pub n_head: usize,
    /// Key and value heads.
    pub n_head_kv: usize,
    /// Experts per layer; 0 if the model is dense.
    pub n_expert: usize,
    /// Whether the file has no `output.weight`: the token embedding is the output matrix, too.
    pub tied_embeddings: bool,
    /// Whether an importance matrix guides the quantisers.
    pub importance: bool,
}

impl FileType {
    /// Every file type, smallest first.
    pub const ALL: &'static [FileType] = &[
        FileType::Q1_0,
        FileType::IQ1_S,
        FileType::TQ1_0,
        FileType::IQ1_M,
        FileType::IQ2_XXS,
        FileType::TQ2_0,
        FileType::Q2_0,
        FileType::IQ2_XS,
        FileType::IQ2_S,
        FileType::IQ2_M,
        FileType::Q2_K_S,
        FileType::Q2_K,
        FileType::IQ3_XXS,
        FileType::IQ3_XS,
        FileType::IQ3_S,
        FileType::Q3_K_S,
        FileType::IQ3_M,
        FileType::Q3_K_M,
        FileType::Q3_K_L,
        FileType::IQ4_XS,
        FileType::MXFP4_MOE,
        FileType::IQ4_NL,
        FileType::NVFP4,
        FileType::Q4_0,
        FileType::Q4_K_S,
        FileType::Q4_K_M,
        FileType::Q4_1,
        FileType::Q5_0,
        FileType::Q5_K_S,
        FileType::Q5_K_M,
        FileType::Q5_1,
        FileType::Q6_K,
        FileType::Q8_0,
        FileType::BF16,
        FileType::F16,
        FileType::F32,
    ];

    /// The file type a user names, in any case; `Q3_K`, `Q4_K` and `Q5_K` mean their `_M` mix.
    pub fn from_name(name: &str) -> Option<FileType> {
        let name = name.to_ascii_uppercase();
        let name = match name.as_str() {
            "Q3_K" => "Q3_K_M",
            "Q4_K" => "Q4_K_M",
            "Q5_K" => "Q5_K_M",
            name => name,
        };
        FileType::ALL
            .iter()
            .copied()
            .find(|t| t.to_string() == name)
    }

    /// The file type numbered `id` in `general.file_type`.
    pub fn from_id(id: u32) -> Option<FileType> {
        FileType::ALL.iter().copied().find(|&t| t as u32 == id)
    }

    /// The type of tensors that no rule of the mix singles out.
    pub fn base(self) -> DType {
        match self {
            FileType::F32 => DType::F32,
            FileType::F16 => DType::F16,
            FileType::BF16 => DType::BF16,
            FileType::Q4_0 => DType::Q4_0,
            FileType::Q4_1 => DType::Q4_1,
            FileType::Q5_0 => DType::Q5_0,
            FileType::Q5_1 => DType::Q5_1,
            FileType::Q8_0 => DType::Q8_0,
            FileType::Q1_0 => DType::Q1_0,
            FileType::Q2_0 => DType::Q2_0,
            FileType::TQ1_0 => DType::TQ1_0,
            FileType::TQ2_0 => DType::TQ2_0,
            FileType::MXFP4_MOE => DType::MXFP4,
            FileType::NVFP4 => DType::NVFP4,
            FileType::IQ1_S => DType::IQ1_S,
            FileType::IQ1_M => DType::IQ1_M,
            FileType::IQ2_XXS => DType::IQ2_XXS,
            FileType::IQ2_XS | FileType::IQ2_S => DType::IQ2_XS,
            FileType::IQ2_M => DType::IQ2_S,
            FileType::IQ3_XXS => DType::IQ3_XXS,
            FileType::IQ3_XS | FileType::IQ3_S | FileType::IQ3_M => DType::IQ3_S,
            FileType::IQ4_NL => DType::IQ4_NL,
            FileType::IQ4_XS => DType::IQ4_XS,
            FileType::Q2_K | FileType::Q2_K_S => DType::Q2_K,
            FileType::Q3_K_S | FileType::Q3_K_M | FileType::Q3_K_L => DType::Q3_K,
            FileType::Q4_K_S | FileType::Q4_K_M => DType::Q4_K,
            FileType::Q5_K_S | FileType::Q5_K_M => DType::Q5_K,
            FileType::Q6_K => DType::Q6_K,
        }
    }

    /// The type for the tensor `name` of shape `dims` (row length first), or `None` if it stays
    /// as it is: vectors, norms, expert routers and other tensors too small or too delicate.
    pub fn tensor_type(self, name: &str, dims: &[u64], model: &ModelShape) -> Option<DType> {
        if !is_quantized(name, dims) {
            return None;
        }
        let base = self.base();
        if matches!(base, DType::F32 | DType::F16 | DType::BF16) {
            return Some(base);
        }
        Some(fallback(self.mixed_type(name, dims, model), dims[0]))
    }

    /// The type that the mix chooses, before checking that rows are whole blocks.
    fn mixed_type(self, name: &str, dims: &[u64], model: &ModelShape) -> DType {
        let base = self.base();
        let layer = layer(name).unwrap_or(0);
        let embedding = matches!(name, "token_embd.weight" | "per_layer_token_embd.weight");
        if name == "output.weight" || embedding && model.tied_embeddings {
            return self.output_type(dims[0]);
        }
        if self == FileType::MXFP4_MOE {
            let is_stack = dims.get(2).is_some_and(|&n| n > 1);
            return if is_stack { base } else { DType::Q8_0 };
        }
        if embedding {
            return self.embedding_type();
        }
        if ["attn_v.weight", "attn_qkv.weight", "attn_kv_b.weight"]
            .iter()
            .any(|s| name.contains(s))
        {
            return self.value_type(layer, model);
        }
        if name.contains("attn_k.weight") || name.contains("attn_q.weight") {
            return self.query_or_key_type(name.contains("attn_k.weight"), model);
        }
        if name.contains("ffn_down") {
            return self.ffn_down_type(layer, model);
        }
        if name.contains("attn_output.weight") {
            return self.attention_output_type(model);
        }
        let inner = (model.n_layer / 8..7 * model.n_layer / 8).contains(&layer);
        if self == FileType::IQ3_XS
            && inner
            && ["ffn_gate", "ffn_up"].iter().any(|s| name.contains(s))
        {
            return DType::IQ3_XXS;
        }
        base
    }

    /// Of one to two bits and a half, with a grid.
    fn is_tiny(self) -> bool {
        use FileType::*;
        matches!(self, IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ2_M)
    }

    fn output_type(self, row: u64) -> DType {
        let base = self.base();
        if self == FileType::MXFP4_MOE || base == DType::Q8_0 || !row.is_multiple_of(base.block().0)
        {
            return DType::Q8_0;
        }
        if self.is_tiny() || self == FileType::IQ3_XXS {
            DType::Q5_K
        } else {
            DType::Q6_K
        }
    }

    fn embedding_type(self) -> DType {
        use FileType::*;
        match self {
            IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS => DType::Q2_K,
            IQ2_S | IQ2_M | IQ3_XXS => DType::IQ3_S,
            TQ1_0 | TQ2_0 | Q2_0 => DType::Q4_K,
            _ => self.base(),
        }
    }

    fn value_type(self, layer: usize, model: &ModelShape) -> DType {
        use FileType::*;
        let grouped = model.n_head >= 4 * model.n_head_kv;
        let more_bits = use_more_bits(layer, model.n_layer);
        if self.is_tiny() {
            return match self {
                _ if grouped || model.n_expert >= 4 => DType::Q4_K,
                IQ2_S | IQ2_M => DType::IQ3_S,
                _ => DType::Q2_K,
            };
        }
        if model.n_expert == 8 {
            // Eight experts share these small tensors.
            return DType::Q8_0;
        }
        let chosen = match self {
            Q2_K | Q2_K_S | IQ3_XXS | IQ3_XS | IQ3_S if grouped => DType::Q4_K,
            Q2_K => DType::Q3_K,
            IQ3_XXS if !model.importance => DType::IQ3_S,
            IQ3_M => DType::Q4_K,
            IQ4_NL | IQ4_XS if grouped => DType::Q5_K,
            Q3_K_M if layer < 2 => DType::Q5_K,
            Q3_K_M => DType::Q4_K,
            Q3_K_L => DType::Q5_K,
            Q4_K_M | Q5_K_M if more_bits => DType::Q6_K,
            Q4_K_S if layer < 4 => DType::Q5_K,
            _ => self.base(),
        };
        // The 70B models: eight query heads share each value head.
        let large = model.n_layer == 80 && model.n_head != model.n_head_kv;
        match chosen {
            DType::Q3_K | DType::Q4_K if large => DType::Q5_K,
            chosen => chosen,
        }
    }

    fn query_or_key_type(self, key: bool, model: &ModelShape) -> DType {
        use FileType::*;
        match self {
            _ if key && model.n_expert == 8 && self.is_tiny() => DType::Q4_K,
            _ if key && model.n_expert == 8 => DType::Q8_0,
            IQ3_XS => DType::IQ3_XXS,
            IQ3_XXS => DType::IQ2_S,
            _ => self.base(),
        }
    }

    fn ffn_down_type(self, layer: usize, model: &ModelShape) -> DType {
        use FileType::*;
        let more_bits = use_more_bits(layer, model.n_layer);
        let first = layer < model.n_layer / 8;
        match self {
            IQ2_S | IQ2_M if first => DType::IQ3_S,
            _ if self.is_tiny() && first => DType::Q2_K,
            Q2_K => DType::Q3_K,
            Q2_K_S if first => DType::Q4_K,
            IQ3_XXS if !model.importance && first => DType::Q4_K,
            IQ3_XXS if !model.importance => DType::Q3_K,
            IQ3_M if first || model.n_expert == 8 && more_bits => DType::Q4_K,
            IQ4_NL | IQ4_XS if first && !model.importance => DType::Q5_K,
            Q4_0 if first && model.importance => DType::Q4_1,
            Q5_0 if first && model.importance => DType::Q5_1,
            Q3_K_M if layer < model.n_layer / 16 => DType::Q5_K,
            Q3_K_M => DType::Q4_K,
            Q3_K_L => DType::Q5_K,
            Q4_K_M | Q5_K_M if more_bits => DType::Q6_K,
            Q4_K_S if first => DType::Q5_K,
            _ => self.base(),
        }
    }

    fn attention_output_type(self, model: &ModelShape) -> DType {
        use FileType::*;
        let eight_experts = model.n_expert == 8;
        match self {
            _ if self.is_tiny() && eight_experts => DType::Q5_K,
            IQ1_S | IQ1_M => DType::IQ2_XXS,
            IQ2_S | IQ2_M => DType::IQ3_S,
            Q2_K | IQ3_XS | IQ3_XXS | IQ3_S | IQ3_M | IQ4_NL | IQ4_XS | Q3_K_S | Q3_K_M
            | Q4_K_S | Q4_K_M
                if eight_experts =>
            {
                DType::Q5_K
            }
            Q2_K => DType::Q3_K,
            IQ3_XXS => DType::IQ3_S,
            Q3_K_M | IQ3_M => DType::Q4_K,
            Q3_K_L if !eight_experts => DType::Q5_K,
            _ => self.base(),
        }
    }
}

/// The name as users type it: `Q4_K_M`.
impl std::fmt::Display for FileType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&format!("{self:?}"))
    }
}

/// Whether the mix chooses this tensor's type.
fn is_quantized(name: &str, dims: &[u64]) -> bool {
    // Small or sensitive tensors; embeddings of positions are looked up, not multiplied.
    const KEPT: &[&str] = &[
        "_norm.weight",
        "ffn_gate_inp.weight",
        "position_embd",
        "token_types",
        "altup",
        "laurel",
        "per_layer_model_proj",
        "ssm_conv1d",
        "shortconv.conv.weight",
        "attn_rel_b.weight",
        "_compressor_ape.weight",
        "time_mix_first.weight",
        "time_mix_w0.weight",
        "time_mix_w1.weight",
        "time_mix_w2.weight",
        "time_mix_v0.weight",
        "time_mix_v1.weight",
        "time_mix_v2.weight",
        "time_mix_a0.weight",
        "time_mix_a1.weight",
        "time_mix_a2.weight",
        "time_mix_g1.weight",
        "time_mix_g2.weight",
        "time_mix_decay_w1.weight",
        "time_mix_decay_w2.weight",
        "time_mix_lerp_fused.weight",
    ];
    // Trailing dimensions of 1 do not make a vector a matrix.
    let n_dims = dims.iter().rposition(|&d| d > 1).map_or(1, |last| last + 1);
    n_dims >= 2 && name.ends_with("weight") && !KEPT.iter().any(|kept| name.contains(kept))
}

/// The layer number `N` in `blk.N.…`.
fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// The first and last eighth of the layers, and every third between.
fn use_more_bits(layer: usize, n_layer: usize) -> bool {
    let eighth = n_layer / 8;
    layer < eighth || layer >= 7 * n_layer / 8 || (layer - eighth) % 3 == 2
}

impl DType {
    /// This type, or the next larger one of whose blocks a row of so many values is a multiple.
    pub fn for_rows_of(self, row: u64) -> DType {
        fallback(self, row)
    }
}

fn fallback(dtype: DType, row: u64) -> DType {
    let fits = |dtype: DType| row.is_multiple_of(dtype.block().0);
    let legacy = match dtype {
        dtype if fits(dtype) => dtype,
        DType::IQ1_S
        | DType::IQ1_M
        | DType::IQ2_XXS
        | DType::IQ2_XS
        | DType::IQ2_S
        | DType::IQ3_XXS
        | DType::IQ3_S
        | DType::IQ4_XS => DType::IQ4_NL,
        DType::Q1_0 | DType::Q2_0 | DType::TQ1_0 | DType::TQ2_0 => DType::Q4_0,
        DType::Q2_K | DType::Q3_K => DType::Q4_0,
        DType::NVFP4 => DType::MXFP4,
        DType::Q4_K => DType::Q5_0,
        DType::Q5_K => DType::Q5_1,
        DType::Q6_K => DType::Q8_0,
        _ => DType::F16,
    };
    if fits(legacy) { legacy } else { DType::F16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DENSE: ModelShape = ModelShape {
        n_layer: 32,
        n_head: 32,
        n_head_kv: 8,
        n_expert: 0,
        tied_embeddings: false,
        importance: false,
    };

    fn chosen(file: FileType, name: &str, row: u64, model: &ModelShape) -> Option<DType> {
        file.tensor_type(name, &[row, 4096], model)
    }

    #[test]
    fn names_and_numbers() {
        for &t in FileType::ALL {
            assert_eq!(FileType::from_name(&t.to_string()), Some(t));
            assert_eq!(FileType::from_id(t as u32), Some(t));
        }
        assert_eq!(FileType::from_name("q4_k"), Some(FileType::Q4_K_M));
        assert_eq!(FileType::from_name("Q9_Z"), None);
        assert_eq!(FileType::from_id(4), None);
    }

    #[test]
    fn more_bits_where_it_matters() {
        let down = |layer| format!("blk.{layer}.ffn_down.weight");
        let more: Vec<usize> = (0..32)
            .filter(|&l| chosen(FileType::Q4_K_M, &down(l), 4096, &DENSE) == Some(DType::Q6_K))
            .collect();
        assert_eq!(
            more,
            [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
        );
        assert_eq!(
            chosen(FileType::Q4_K_S, &down(3), 4096, &DENSE),
            Some(DType::Q5_K)
        );
        assert_eq!(
            chosen(FileType::Q4_K_S, &down(4), 4096, &DENSE),
            Some(DType::Q4_K)
        );
        assert_eq!(
            chosen(FileType::Q4_K_M, "output.weight", 4096, &DENSE),
            Some(DType::Q6_K)
        );
        assert_eq!(
            chosen(FileType::Q8_0, "output.weight", 4096, &DENSE),
            Some(DType::Q8_0)
        );
        assert_eq!(
            chosen(FileType::Q4_0, "token_embd.weight", 4096, &DENSE),
            Some(DType::Q4_0)
        );
        let tied = ModelShape {
            tied_embeddings: true,
            ..DENSE
        };
        assert_eq!(
            chosen(FileType::Q4_0, "token_embd.weight", 4096, &tied),
            Some(DType::Q6_K)
        );
    }

    /// As llama-quantize chooses them (read from its source).
    #[test]
    fn mixes_with_a_grid() {
        let guided = ModelShape {
            importance: true,
            ..DENSE
        };
        for (file, name, dtype) in [
            (FileType::IQ1_S, "token_embd.weight", DType::Q2_K),
            (FileType::IQ1_S, "output.weight", DType::Q5_K),
            (FileType::IQ1_S, "blk.9.attn_output.weight", DType::IQ2_XXS),
            (FileType::IQ2_XS, "blk.9.attn_v.weight", DType::Q4_K),
            (FileType::IQ2_M, "blk.3.ffn_down.weight", DType::IQ3_S),
            (FileType::IQ2_M, "blk.4.ffn_down.weight", DType::IQ2_S),
            (FileType::IQ3_XXS, "blk.9.attn_q.weight", DType::IQ2_S),
            (FileType::IQ3_XXS, "blk.9.ffn_down.weight", DType::IQ3_XXS),
            (FileType::IQ3_XS, "blk.3.ffn_up.weight", DType::IQ3_S),
            (FileType::IQ3_XS, "blk.4.ffn_up.weight", DType::IQ3_XXS),
            (FileType::IQ4_XS, "blk.0.ffn_down.weight", DType::IQ4_XS),
            (FileType::Q4_0, "blk.0.ffn_down.weight", DType::Q4_1),
            (FileType::Q2_0, "token_embd.weight", DType::Q4_K),
        ] {
            assert_eq!(
                chosen(file, name, 4096, &guided),
                Some(dtype),
                "{file} {name}"
            );
        }
        for (file, dtype) in [
            (FileType::IQ3_XXS, DType::Q4_K),
            (FileType::IQ4_XS, DType::Q5_K),
        ] {
            assert_eq!(
                chosen(file, "blk.0.ffn_down.weight", 4096, &DENSE),
                Some(dtype)
            );
        }
        let experts =
            FileType::MXFP4_MOE.tensor_type("blk.0.ffn_up_exps.weight", &[256, 64, 8], &DENSE);
        assert_eq!(experts, Some(DType::MXFP4));
        assert_eq!(
            chosen(FileType::MXFP4_MOE, "blk.0.attn_q.weight", 256, &DENSE),
            Some(DType::Q8_0)
        );
    }

    #[test]
    fn experts_and_70b() {
        let mixtral = ModelShape {
            n_expert: 8,
            ..DENSE
        };
        let file = FileType::Q4_K_M;
        for (name, dtype) in [
            ("blk.0.attn_v.weight", Some(DType::Q8_0)),
            ("blk.0.attn_k.weight", Some(DType::Q8_0)),
            ("blk.0.attn_q.weight", Some(DType::Q4_K)),
            ("blk.0.attn_output.weight", Some(DType::Q5_K)),
            ("blk.0.ffn_down_exps.weight", Some(DType::Q6_K)),
            ("blk.0.ffn_gate_inp.weight", None),
        ] {
            assert_eq!(chosen(file, name, 4096, &mixtral), dtype, "{name}");
        }
        let large = ModelShape {
            n_layer: 80,
            ..DENSE
        };
        assert_eq!(
            chosen(file, "blk.10.attn_v.weight", 4096, &large),
            Some(DType::Q5_K)
        );
    }

    #[test]
    fn rows_that_are_not_whole_blocks() {
        let up = "blk.9.ffn_up.weight";
        for (file, row, dtype) in [
            (FileType::Q2_K, 96, DType::Q4_0),
            (FileType::Q4_K_M, 96, DType::Q5_0),
            (FileType::Q5_K_M, 96, DType::Q5_1),
            (FileType::Q6_K, 96, DType::Q8_0),
            (FileType::Q4_K_M, 100, DType::F16),
            (FileType::Q4_0, 100, DType::F16),
            (FileType::IQ2_M, 96, DType::IQ4_NL),
            (FileType::Q1_0, 192, DType::Q4_0),
            (FileType::NVFP4, 96, DType::MXFP4),
        ] {
            assert_eq!(chosen(file, up, row, &DENSE), Some(dtype), "{file} {row}");
        }
        assert_eq!(
            chosen(FileType::Q4_K_M, "output.weight", 96, &DENSE),
            Some(DType::Q8_0)
        );
    }

    #[test]
    fn kept_as_they_are() {
        for (name, dims) in [
            ("blk.0.attn_norm.weight", vec![64]),
            ("blk.0.attn_q_norm.weight", vec![64, 4]),
            ("blk.0.attn_q.bias", vec![64]),
            ("rope_freqs.weight", vec![32, 1]),
            ("blk.1.attn_compressor_ape.weight", vec![64, 4]),
            ("blk.0.ffn_gate_inp.weight", vec![64, 8]),
        ] {
            for &file in FileType::ALL {
                assert_eq!(file.tensor_type(name, &dims, &DENSE), None, "{file} {name}");
            }
        }
    }
}
