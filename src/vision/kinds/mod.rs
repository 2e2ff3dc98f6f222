//! Kinds of projectors: each maps the metadata and tensors of its files to an encoder, which is
//! data over one executor.

mod gemma;
mod glm4v;
mod idefics3;
mod internvl;
mod lfm2;
mod llama4;
mod llava;
mod minicpm;
mod pixtral;
mod qwen;

pub(super) use llava::{n_unpadded, unpadded};

use crate::gguf::TensorInfo;
use crate::layers::hparams::Hparams;
use crate::layers::spans::Sight;
use crate::vision::VisionError;
use crate::vision::attention::Heads;
use crate::vision::file::{File, out_of_range};
use crate::vision::layout::{Layout, TextPositions};
use crate::vision::ops::{Act, Op};
use crate::vision::positions::{Positions, TableRule};
use crate::vision::preprocess::{MAX_PATCHES, Preprocess};
use crate::vision::vit::{Block, Class, ClassPlace, Vit};

/// An encoder with everything around it.
#[derive(Debug)]
pub(super) struct Tower {
    pub(super) vit: Vit,
    pub(super) preprocess: Preprocess,
    pub(super) mean: [f32; 3],
    pub(super) std: [f32; 3],
    /// Side of the blocks of patches that are computed one after the other, and of windows in
    /// such blocks.
    pub(super) order: (usize, usize),
    pub(super) layout: Layout,
    /// What stands for an image in prompts, the longest first.
    pub(super) markers: &'static [&'static str],
    /// The token whose id stands in the places of embeddings.
    pub(super) place: &'static str,
    pub(super) positions: TextPositions,
    pub(super) sight: fn(&Hparams) -> Sight,
    /// LLaVA-NeXT: the embedding that ends a row.
    pub(super) newline: Option<Vec<f32>>,
}

/// A kind of projector.
pub(super) struct Kind {
    /// `clip.projector_type`.
    pub(super) name: &'static str,
    /// Architectures of models it is for.
    pub(super) of_models: &'static [&'static str],
    pub(super) bind: fn(&File<'_>, &Sizes) -> Result<Tower, VisionError>,
}

/// All kinds that this build encodes.
pub(super) const KINDS: &[Kind] = &[
    Kind {
        name: "gemma3",
        of_models: &["gemma3"],
        bind: gemma::gemma3,
    },
    Kind {
        name: "gemma4v",
        of_models: &["gemma4"],
        bind: gemma::gemma4,
    },
    Kind {
        name: "qwen2vl_merger",
        of_models: &["qwen2vl"],
        bind: qwen::qwen2,
    },
    Kind {
        name: "qwen2.5vl_merger",
        of_models: &["qwen2vl"],
        bind: qwen::qwen25,
    },
    Kind {
        name: "qwen3vl_merger",
        of_models: &["qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"],
        bind: qwen::qwen3,
    },
    Kind {
        name: "idefics3",
        of_models: &["llama", "smollm3"],
        bind: idefics3::bind,
    },
    Kind {
        name: "pixtral",
        of_models: &["mistral3", "llama", "mistral"],
        bind: pixtral::bind,
    },
    Kind {
        name: "mlp",
        of_models: &["llama", "mistral", "qwen2"],
        bind: llava::bind,
    },
    Kind {
        name: "internvl",
        of_models: &["qwen2", "qwen3", "internlm2", "llama", "qwen3moe"],
        bind: internvl::bind,
    },
    Kind {
        name: "lfm2",
        of_models: &["lfm2"],
        bind: lfm2::bind,
    },
    Kind {
        name: "glm4v",
        of_models: &["glm4"],
        bind: glm4v::bind,
    },
    Kind {
        name: "minicpmv4_6",
        of_models: &["qwen35", "qwen35moe"],
        bind: minicpm::bind,
    },
    Kind {
        name: "llama4",
        of_models: &["llama4"],
        bind: llama4::bind,
    },
];

/// Most tiles along a side of an image.
const MAX_TILES: usize = 32;

/// Sizes that all files say.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) image: usize,
    pub(super) patch: usize,
    pub(super) width: usize,
    pub(super) n_ff: usize,
    pub(super) n_layer: usize,
    pub(super) n_head: usize,
    /// Width of the model.
    pub(super) n_embd: usize,
}

impl Sizes {
    pub(super) fn of(file: &File<'_>, n_embd: usize) -> Result<Sizes, VisionError> {
        let sizes = Sizes {
            image: file.count("image_size", 1 << 12)?,
            patch: file.count("patch_size", 1 << 10)?,
            width: file.count("embedding_length", 1 << 14)?,
            n_ff: file.count("feed_forward_length", 1 << 18)?,
            n_layer: file.count("block_count", 1 << 10)?,
            n_head: file.count("attention.head_count", 1 << 10)?,
            n_embd,
        };
        if sizes.side() == 0 || sizes.side().pow(2) > MAX_PATCHES {
            let expected = format!("1 to {} patches of {}", MAX_PATCHES.isqrt(), sizes.patch);
            return Err(out_of_range("image_size", sizes.image, &expected));
        }
        if !sizes.width.is_multiple_of(2 * sizes.n_head) {
            let expected = format!("a divisor of half of {}", sizes.width);
            return Err(out_of_range(
                "attention.head_count",
                sizes.n_head,
                &expected,
            ));
        }
        Ok(sizes)
    }

    fn head_dim(&self) -> usize {
        self.width / self.n_head
    }

    /// Patches per side of the square that positions are for.
    fn side(&self) -> usize {
        self.image / self.patch
    }
}

/// Activation by the flags of a file, as the authors compute it: `gelu` where it says GELU.
fn activation(file: &File<'_>, gelu: Act) -> Result<Act, VisionError> {
    Ok(if file.flag("clip.use_silu")? {
        Act::Silu
    } else if file.flag("clip.use_gelu")? {
        gelu
    } else {
        Act::QuickGelu
    })
}

/// Layers by the usual names; norms and activations as far as the file has them.
fn blocks(file: &File<'_>, sizes: &Sizes, n_ff: usize) -> Result<Vec<Block>, VisionError> {
    let (n, dim) = (sizes.width, sizes.head_dim());
    let block = |i: usize| {
        let name = |part: &str| format!("v.blk.{i}.{part}");
        let linear = |part: &str, n_in: usize, n_out: usize| file.linear(&name(part), n_in, n_out);
        let qkv = if file.has(&name("attn_qkv.weight")) {
            let fused = linear("attn_qkv", n, 3 * n)?;
            [0, 1, 2].map(|i| fused.rows(i * n..(i + 1) * n))
        } else {
            [
                linear("attn_q", n, n)?,
                linear("attn_k", n, n)?,
                linear("attn_v", n, n)?,
            ]
        };
        let scale = |part: &str| match file.has(&name(part)) {
            true => file.values(&name(part), &[n]).map(Some),
            false => Ok(None),
        };
        // LLaVA's files call the first of the two matrices the one down.
        let is_first = |t: &TensorInfo| t.dims[..] == [n as u64, n_ff as u64];
        let is_swapped = n != n_ff
            && file
                .gguf
                .tensor(&name("ffn_down.weight"))
                .is_some_and(is_first);
        let (up, down) = if is_swapped {
            ("ffn_down", "ffn_up")
        } else {
            ("ffn_up", "ffn_down")
        };
        Ok(Block {
            norm1: file.norm(&name("ln1"), n, file.eps)?,
            qkv,
            q_norm: file.opt_norm(&name("attn_q_norm"), dim)?,
            k_norm: file.opt_norm(&name("attn_k_norm"), dim)?,
            v_norm: None,
            out: linear("attn_out", n, n)?,
            post_attention: file.opt_norm(&name("attn_post_norm"), n)?,
            scale1: scale("ls1.weight")?,
            norm2: file.norm(&name("ln2"), n, file.eps)?,
            gate: match file.has(&name("ffn_gate.weight")) {
                true => Some(linear("ffn_gate", n, n_ff)?),
                false => None,
            },
            up: linear(up, n, n_ff)?,
            down: linear(down, n_ff, n)?,
            post_ffn: file.opt_norm(&name("ffn_post_norm"), n)?,
            scale2: scale("ls2.weight")?,
            windowed: false,
        })
    };
    (0..sizes.n_layer).map(block).collect()
}

/// An encoder with the usual parts, and nothing after its layers but `ops`.
fn vit(
    file: &File<'_>,
    sizes: &Sizes,
    n_ff: usize,
    act: Act,
    ops: Vec<Op>,
) -> Result<Vit, VisionError> {
    let (p, n) = (sizes.patch, sizes.width);
    let is_matrix = |t: &TensorInfo| t.dims.len() == 2;
    let inputs: &[usize] = match file
        .gguf
        .tensor("v.patch_embd.weight")
        .is_some_and(is_matrix)
    {
        true => &[3 * p * p],
        false => &[p, p, 3],
    };
    let mut patches = vec![file.shaped_linear("v.patch_embd", inputs, n)?];
    if file.has("v.patch_embd.weight.1") {
        patches.push(file.slice("v.patch_embd.weight.1", inputs, n)?);
    }
    Ok(Vit {
        patch: p,
        patches,
        affine: (1.0, 0.0),
        patch_norm: None,
        positions: None,
        class: None,
        pre_norm: file.opt_norm("v.pre_ln", n)?,
        rope: None,
        heads: Heads {
            n: sizes.n_head,
            dim: sizes.head_dim(),
            scale: 1.0 / (sizes.head_dim() as f32).sqrt(),
        },
        width: n,
        act,
        blocks: blocks(file, sizes, n_ff)?,
        merger: None,
        deepstack: Vec::new(),
        ops,
        shapes: Vec::new(),
    })
}

/// A table of positions with `n` rows.
fn positions(
    file: &File<'_>,
    sizes: &Sizes,
    rule: TableRule,
    n: usize,
) -> Result<Positions, VisionError> {
    let table = file.values("v.position_embd.weight", &[sizes.width, n])?;
    Ok(Positions { rule, table, n })
}

/// A square table of positions of any size.
fn square_positions(
    file: &File<'_>,
    sizes: &Sizes,
    rule: TableRule,
) -> Result<Positions, VisionError> {
    let n = file.n_rows("v.position_embd.weight", 1 << 20)?;
    if n.isqrt().pow(2) != n {
        return Err(out_of_range("position_embd", n, "a square number of rows"));
    }
    positions(file, sizes, rule, n)
}

/// A class token, and the table of positions of all tokens, of which it takes its own.
fn class(
    file: &File<'_>,
    sizes: &Sizes,
    place: ClassPlace,
) -> Result<(Class, Positions), VisionError> {
    let (n, n_patches) = (sizes.width, sizes.side().pow(2));
    let mut values = file.values("v.class_embd", &[n])?;
    let mut table = file.values("v.position_embd.weight", &[n, n_patches + 1])?;
    let own = match place {
        ClassPlace::First => table.drain(..n).collect::<Vec<f32>>(),
        ClassPlace::Last => table.split_off(n_patches * n),
    };
    values.iter_mut().zip(own).for_each(|(x, own)| *x += own);
    let positions = Positions {
        rule: TableRule::Rows,
        table,
        n: n_patches,
    };
    Ok((Class { place, values }, positions))
}

/// Refuses a factor by which the side of the grid is not divisible.
fn divides(sizes: &Sizes, k: usize) -> Result<(), VisionError> {
    if !sizes.image.is_multiple_of(sizes.patch) || !sizes.side().is_multiple_of(k) {
        let expected = format!("a multiple of {k} patches of {}", sizes.patch);
        return Err(out_of_range("image_size", sizes.image, &expected));
    }
    Ok(())
}

/// Tokens of a text see earlier ones only.
fn causal(_: &Hparams) -> Sight {
    Sight::Causal
}
