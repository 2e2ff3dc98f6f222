//! Table of the Metal kernels: the buffers that each reads and writes, their sizes for a given
//! problem, and the number of threads. The host dispatches by this table, and `tests/metal` runs
//! and checks the shaders by it.
//!
//! A kernel's last buffer is its arguments, a structure of the same name and fields in its source.

use crate::quant::DType;
use bytemuck::{Pod, Zeroable};

/// Positions per page.
pub const PAGE_POSITIONS: u32 = 64;
/// Positions per split of keys in [`ATTENTION_DECODE`].
pub const SPLIT: u32 = 8 * PAGE_POSITIONS;
/// Most experts of a layer.
pub const MAX_EXPERTS: u32 = 512;
/// Values of a row that a threadgroup of [`TOP_K`] sorts.
pub const SORTED: u32 = 1024;
/// Threadgroup memory that every Apple GPU has, in bytes.
pub const THREADGROUP_MEMORY: u32 = 32768;

/// Weight formats that the kernels read without conversion.
pub const FORMATS: &[DType] = &[
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q5_0,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::IQ4_XS,
    DType::IQ4_NL,
    DType::MXFP4,
    DType::Q1_0,
    DType::Q2_0,
];

/// Element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Element {
    /// `float`.
    F32,
    /// `float2`: cosine and sine.
    F32x2,
    /// `uint`.
    U32,
    /// Rows of weight blocks, `uchar`.
    Weights,
    /// Position of a row, and index of its sequence's page table in all tables: two `uint`.
    Row,
    /// First row and number of rows, two `uint`.
    Tile,
    /// Address of a page on the GPU.
    Page,
}

impl Element {
    /// Name of the type in the shaders.
    pub fn msl(self) -> &'static str {
        match self {
            Element::F32 => "float",
            Element::F32x2 => "float2",
            Element::U32 => "uint",
            Element::Weights => "uchar",
            Element::Row => "Row",
            Element::Tile => "Tile",
            Element::Page => "Page",
        }
    }

    /// Size of an element in bytes.
    pub fn size(self) -> u64 {
        match self {
            Element::Weights => 1,
            Element::F32 | Element::U32 => 4,
            Element::F32x2 | Element::Row | Element::Tile | Element::Page => 8,
        }
    }

    /// Alignment of a buffer's address, in bytes.
    pub fn align(self) -> u64 {
        match self {
            Element::Weights => 4, // Q4_K, Q5_K and IQ4_XS are read as 32-bit words
            _ => self.size(),
        }
    }
}

/// What a kernel does with a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Access {
    Read,
    Write,
    ReadWrite,
}

/// A buffer of a kernel.
#[derive(Debug)]
pub struct Buffer<A> {
    /// Name of the parameter.
    pub name: &'static str,
    /// Element type.
    pub element: Element,
    /// Access by the kernel.
    pub access: Access,
    /// Number of elements, given the arguments.
    pub len: fn(&A) -> u64,
}

const fn reads<A>(name: &'static str, element: Element, len: fn(&A) -> u64) -> Buffer<A> {
    Buffer {
        name,
        element,
        access: Access::Read,
        len,
    }
}

const fn writes<A>(name: &'static str, element: Element, len: fn(&A) -> u64) -> Buffer<A> {
    Buffer {
        name,
        element,
        access: Access::Write,
        len,
    }
}

const fn changes<A>(name: &'static str, element: Element, len: fn(&A) -> u64) -> Buffer<A> {
    Buffer {
        name,
        element,
        access: Access::ReadWrite,
        len,
    }
}

/// Arguments of kernels.
pub trait Args: Pod {
    /// Name of the structure, here and in the shaders.
    const NAME: &'static str;
    /// Names and types (`u32`, `f32`) of its fields in order.
    const FIELDS: &'static [(&'static str, &'static str)];
}

macro_rules! args {
    ($($name:ident { $($field:ident: $type:ident),* })*) => {$(
        #[doc = concat!("Arguments of kernels, `struct ", stringify!($name), "` in the shaders.")]
        #[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
        #[repr(C)]
        #[allow(missing_docs)] // fields have GGUF's names
        pub struct $name { $(pub $field: $type),* }

        impl Args for $name {
            const NAME: &'static str = stringify!($name);
            const FIELDS: &'static [(&'static str, &'static str)] =
                &[$((stringify!($field), stringify!($type))),*];
        }
    )*};
}

args! {
    MatvecArgs { n_in: u32, n_out: u32, n_rows: u32, row_bytes: u32 }
    MatvecExpertsArgs { n_in: u32, n_out: u32, n_chosen: u32, n_expert: u32, choices_per_row: u32, row_bytes: u32 }
    MatmulArgs { n_in: u32, n_out: u32, n_rows: u32, row_bytes: u32 }
    MatmulExpertsArgs { n_in: u32, n_out: u32, n_chosen: u32, n_expert: u32, choices_per_row: u32, row_bytes: u32 }
    EmbedArgs { n_embd: u32, n_vocab: u32, n_rows: u32, row_bytes: u32, scale: f32 }
    AttentionArgs {
        n_rows: u32, n_head: u32, n_head_kv: u32, head_dim: u32, head_dim_v: u32, key_offset: u32, value_offset: u32,
        key_bits: u32, value_bits: u32, window: u32, n_pages: u32, n_splits: u32, n_tiles: u32, scale: f32, softcap: f32
    }
    AppendArgs {
        n_rows: u32, n_pages: u32, n_head_kv: u32, head_dim: u32, head_dim_v: u32, key_offset: u32, value_offset: u32,
        key_bits: u32, value_bits: u32
    }
    HadamardArgs { n: u32, n_rows: u32, log_side: u32, factor: f32 }
    NormArgs { n: u32, n_rows: u32, eps: f32 }
    NormAddArgs { n: u32, n_rows: u32, eps: f32, branch_scale: f32 }
    RopeArgs { n_rows: u32, n_head: u32, head_dim: u32, n_dims: u32 }
    ElementwiseArgs { n: u32 }
    AddScaledArgs { n: u32, scale: f32 }
    AddBiasArgs { n: u32, n_rows: u32 }
    AddGatedArgs { n: u32, n_rows: u32 }
    AddExpertBiasArgs { n: u32, n_chosen: u32, n_expert: u32 }
    FinishLogitsArgs { n: u32, scale: f32, softcap: f32 }
    RouteArgs { n_rows: u32, n_expert: u32, n_used: u32, gating: u32, normalise: u32, scale: f32 }
    ExpertRowsArgs { n_chosen: u32, n_expert: u32 }
    CombineExpertsArgs { n: u32, n_rows: u32, n_used: u32 }
    SampleArgs { n: u32, n_rows: u32 }
    TopKArgs { n: u32, n_rows: u32, k: u32 }
    LoraArgs { n_in: u32, n_out: u32, rank: u32, n_rows: u32, b_stride: u32, scale: f32 }
    LoraExpertsArgs { n_in: u32, n_out: u32, n_chosen: u32, n_expert: u32, choices_per_row: u32, n_values: u32 }
}

/// A kernel, or a family of kernels that differ in weight format and in a variant number.
#[derive(Debug)]
pub struct Kernel<A: 'static> {
    /// Name of the function.
    pub name: &'static str,
    /// Its file in `src/metal_shaders`.
    pub source: &'static str,
    /// Whether there is an instance for each of [`FORMATS`].
    pub per_format: bool,
    /// Variant numbers; empty if there are none.
    pub variants: &'static [u32],
    /// Buffers before the arguments, in order of their indices.
    pub buffers: &'static [Buffer<A>],
    /// Threads per threadgroup.
    pub threads: u32,
    /// Threadgroup memory in bytes, given the variant number (0 if there is none).
    pub threadgroup_bytes: fn(u32) -> u32,
    /// Number of threadgroups, given arguments and variant number.
    pub grid: fn(&A, u32) -> [u32; 3],
}

/// A kernel with the sizes of one call.
#[derive(Clone, Debug)]
pub struct Dispatch {
    /// Its full name in the library.
    pub kernel: String,
    /// Required bytes of each buffer before the arguments.
    pub lens: Vec<u64>,
    /// The arguments' bytes.
    pub args: Vec<u8>,
    /// Number of threadgroups.
    pub grid: [u32; 3],
    /// Threads per threadgroup.
    pub threads: u32,
    /// Threadgroup memory in bytes.
    pub threadgroup_bytes: u32,
}

/// Table entry of a kernel, independent of arguments.
#[derive(Clone, Debug)]
pub struct Declaration {
    /// Name of the function.
    pub name: &'static str,
    /// Its file in `src/metal_shaders`.
    pub source: &'static str,
    /// Full names of the instances, with their threadgroup memory in bytes.
    pub instances: Vec<(String, u32)>,
    /// Buffers before the arguments.
    pub buffers: Vec<(&'static str, Element, Access)>,
    /// Name of the arguments' structure.
    pub args: &'static str,
    /// Names and types of the structure's fields.
    pub fields: &'static [(&'static str, &'static str)],
    /// Threads per threadgroup.
    pub threads: u32,
}

impl<A: Args> Kernel<A> {
    /// Name in the library: `matvec_q4_k_1`. Kernels without formats or variants ignore `format` or
    /// `variant`.
    pub fn full_name(&self, format: DType, variant: u32) -> String {
        let mut name = String::from(self.name);
        if self.per_format {
            name += &format!("_{}", format.to_string().to_lowercase());
        }
        if !self.variants.is_empty() {
            name += &format!("_{variant}");
        }
        name
    }

    /// The dispatch for a problem.
    pub fn dispatch(&self, format: DType, variant: u32, args: &A) -> Dispatch {
        Dispatch {
            kernel: self.full_name(format, variant),
            lens: self
                .buffers
                .iter()
                .map(|b| (b.len)(args) * b.element.size())
                .collect(),
            args: bytemuck::bytes_of(args).to_vec(),
            grid: (self.grid)(args, variant),
            threads: self.threads,
            threadgroup_bytes: (self.threadgroup_bytes)(variant),
        }
    }

    fn declaration(&self) -> Declaration {
        let formats = if self.per_format {
            FORMATS
        } else {
            &FORMATS[..1]
        };
        let variants = if self.variants.is_empty() {
            &[0]
        } else {
            self.variants
        };
        let instances = formats.iter().flat_map(|&format| {
            variants
                .iter()
                .map(move |&v| (self.full_name(format, v), (self.threadgroup_bytes)(v)))
        });
        Declaration {
            name: self.name,
            source: self.source,
            instances: instances.collect(),
            buffers: self
                .buffers
                .iter()
                .map(|b| (b.name, b.element, b.access))
                .collect(),
            args: A::NAME,
            fields: A::FIELDS,
            threads: self.threads,
        }
    }
}

/// Product of `u32`s.
fn product(factors: &[u32]) -> u64 {
    factors.iter().map(|&f| u64::from(f)).product()
}

const NO_VARIANTS: &[u32] = &[];
const NO_MEMORY: fn(u32) -> u32 = |_| 0;

/// Weight rows per simdgroup of [`MATVEC`] when there are `rows` activation rows.
fn outs_of(rows: u32) -> u32 {
    if rows <= 2 { 4 } else { 2 }
}

/// `y = x·Wᵀ` for up to as many activation rows as the variant number (more take several
/// threadgroups).
pub static MATVEC: Kernel<MatvecArgs> = Kernel {
    name: "matvec",
    source: "matvec.metal",
    per_format: true,
    variants: &[1, 2, 4, 8],
    buffers: &[
        reads("w", Element::Weights, |a| product(&[a.n_out, a.row_bytes])),
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n_in])),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n_out])),
    ],
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, rows| {
        [
            a.n_out.div_ceil(4 * outs_of(rows)),
            a.n_rows.div_ceil(rows),
            1,
        ]
    },
};

/// One product per chosen expert.
pub static MATVEC_EXPERTS: Kernel<MatvecExpertsArgs> = Kernel {
    name: "matvec_experts",
    source: "matvec.metal",
    per_format: true,
    variants: NO_VARIANTS,
    buffers: &[
        reads("w", Element::Weights, |a| {
            product(&[a.n_expert, a.n_out, a.row_bytes])
        }),
        reads("x", Element::F32, |a| {
            product(&[a.n_chosen / a.choices_per_row, a.n_in])
        }),
        reads("chosen", Element::U32, |a| a.n_chosen.into()),
        writes("y", Element::F32, |a| product(&[a.n_chosen, a.n_out])),
    ],
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_out.div_ceil(4 * outs_of(1)), a.n_chosen, 1],
};

/// Activation rows and weight rows of a tile, and bytes of its panels.
const TILE: (u32, u32, u32) = (32, 64, (32 + 64) * 36 * 4);

/// `y = x·Wᵀ` for many activation rows.
pub static MATMUL: Kernel<MatmulArgs> = Kernel {
    name: "matmul",
    source: "matmul.metal",
    per_format: true,
    variants: NO_VARIANTS,
    buffers: &[
        reads("w", Element::Weights, |a| product(&[a.n_out, a.row_bytes])),
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n_in])),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n_out])),
    ],
    threads: 128,
    threadgroup_bytes: |_| TILE.2,
    grid: |a, _| [a.n_out.div_ceil(TILE.1), a.n_rows.div_ceil(TILE.0), 1],
};

/// Products of all experts with the rows that chose them, from the lists of [`EXPERT_ROWS`].
pub static MATMUL_EXPERTS: Kernel<MatmulExpertsArgs> = Kernel {
    name: "matmul_experts",
    source: "matmul.metal",
    per_format: true,
    variants: NO_VARIANTS,
    buffers: &[
        reads("w", Element::Weights, |a| {
            product(&[a.n_expert, a.n_out, a.row_bytes])
        }),
        reads("x", Element::F32, |a| {
            product(&[a.n_chosen / a.choices_per_row, a.n_in])
        }),
        reads("counts", Element::U32, |a| a.n_expert.into()),
        reads("lists", Element::U32, |a| {
            product(&[a.n_expert, a.n_chosen])
        }),
        writes("y", Element::F32, |a| product(&[a.n_chosen, a.n_out])),
    ],
    threads: 128,
    threadgroup_bytes: |_| TILE.2,
    grid: |a, _| {
        [
            a.n_out.div_ceil(TILE.1),
            a.n_chosen.div_ceil(TILE.0),
            a.n_expert,
        ]
    },
};

/// Looks up rows of the embedding table.
pub static EMBED: Kernel<EmbedArgs> = Kernel {
    name: "embed",
    source: "embed.metal",
    per_format: true,
    variants: NO_VARIANTS,
    buffers: &[
        reads("w", Element::Weights, |a| {
            product(&[a.n_vocab, a.row_bytes])
        }),
        reads("tokens", Element::U32, |a| a.n_rows.into()),
        writes("x", Element::F32, |a| product(&[a.n_rows, a.n_embd])),
    ],
    threads: 32,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_embd.div_ceil(16 * 32), a.n_rows, 1],
};

/// Variant numbers of attention kernels: each takes heads up to this width.
pub const HEAD_DIMS: &[u32] = &[128, 256, 512];

/// Attention of generated tokens, one split of the keys per threadgroup. `n_splits` is the largest
/// number of splits of a row in the batch, `n_pages` the length of all page tables.
pub static ATTENTION_DECODE: Kernel<AttentionArgs> = Kernel {
    name: "attention_decode",
    source: "attention_decode.metal",
    per_format: false,
    variants: HEAD_DIMS,
    buffers: &[
        reads("q", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.head_dim])
        }),
        reads("rows", Element::Row, |a| a.n_rows.into()),
        reads("pages", Element::Page, |a| a.n_pages.into()),
        writes("partial", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.n_splits, a.head_dim_v + 2])
        }),
    ],
    threads: 128,
    threadgroup_bytes: |d| (2 * 1024 + 1024 / d * 65) * 4,
    grid: |a, d| {
        [
            a.n_splits,
            a.n_head_kv * (a.n_head / a.n_head_kv).div_ceil(1024 / d),
            a.n_rows,
        ]
    },
};

/// Merges the splits of [`ATTENTION_DECODE`].
pub static ATTENTION_MERGE: Kernel<AttentionArgs> = Kernel {
    name: "attention_merge",
    source: "attention_decode.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("partial", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.n_splits, a.head_dim_v + 2])
        }),
        reads("rows", Element::Row, |a| a.n_rows.into()),
        reads("sinks", Element::F32, |a| a.n_head.into()),
        writes("out", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.head_dim_v])
        }),
    ],
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_head, a.n_rows, 1],
};

/// Largest number of rows in a tile of [`ATTENTION_PROMPT`], given its variant number.
pub fn prompt_tile_rows(variant: u32) -> u32 {
    4096 / variant
}

/// Attention of prompts, one tile of rows per threadgroup.
pub static ATTENTION_PROMPT: Kernel<AttentionArgs> = Kernel {
    name: "attention_prompt",
    source: "attention_prompt.metal",
    per_format: false,
    variants: HEAD_DIMS,
    buffers: &[
        reads("q", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.head_dim])
        }),
        reads("rows", Element::Row, |a| a.n_rows.into()),
        reads("pages", Element::Page, |a| a.n_pages.into()),
        reads("tiles", Element::Tile, |a| a.n_tiles.into()),
        reads("sinks", Element::F32, |a| a.n_head.into()),
        writes("out", Element::F32, |a| {
            product(&[a.n_rows, a.n_head, a.head_dim_v])
        }),
    ],
    threads: 128,
    threadgroup_bytes: |d| (4096 + prompt_tile_rows(d) * (64 + 8)) * 4 + d * 16,
    grid: |a, _| [a.n_tiles, a.n_head, 1],
};

/// Appends keys and values to pages, in f16 or quantised; a simdgroup takes up to 32 values of a
/// head.
pub static APPEND: Kernel<AppendArgs> = Kernel {
    name: "append",
    source: "pages.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("keys", Element::F32, |a| {
            product(&[a.n_rows, a.n_head_kv, a.head_dim])
        }),
        reads("values", Element::F32, |a| {
            product(&[a.n_rows, a.n_head_kv, a.head_dim_v])
        }),
        reads("rows", Element::Row, |a| a.n_rows.into()),
        reads("pages", Element::Page, |a| a.n_pages.into()),
    ],
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| {
        [
            (a.n_head_kv * (a.head_dim.div_ceil(32) + a.head_dim_v.div_ceil(32))).div_ceil(4),
            a.n_rows,
            1,
        ]
    },
};

/// Transforms keys below 8 bits, and their queries, in place: each row is a head of at most 512
/// values.
pub static HADAMARD: Kernel<HadamardArgs> = Kernel {
    name: "hadamard",
    source: "pages.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[changes("x", Element::F32, |a| product(&[a.n_rows, a.n]))],
    threads: 128,
    threadgroup_bytes: |_| 4 * 512 * 4,
    grid: |a, _| [a.n_rows.div_ceil(4), 1, 1],
};

/// RMS norm of rows.
pub static RMS_NORM: Kernel<NormArgs> = Kernel {
    name: "rms_norm",
    source: "norm.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("w", Element::F32, |a| a.n.into()),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
    ],
    threads: 256,
    threadgroup_bytes: |_| 32,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// Adds a branch to the residual stream, then RMS norm.
pub static RMS_NORM_ADD: Kernel<NormAddArgs> = Kernel {
    name: "rms_norm_add",
    source: "norm.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("branch", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("w", Element::F32, |a| a.n.into()),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
    ],
    threads: 256,
    threadgroup_bytes: |_| 32,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// Layer norm of rows.
pub static LAYER_NORM: Kernel<NormArgs> = Kernel {
    name: "layer_norm",
    source: "norm.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("w", Element::F32, |a| a.n.into()),
        reads("b", Element::F32, |a| a.n.into()),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
    ],
    threads: 256,
    threadgroup_bytes: |_| 32,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// Adds a branch to the residual stream, then layer norm.
pub static LAYER_NORM_ADD: Kernel<NormAddArgs> = Kernel {
    name: "layer_norm_add",
    source: "norm.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("branch", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("w", Element::F32, |a| a.n.into()),
        reads("b", Element::F32, |a| a.n.into()),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
    ],
    threads: 256,
    threadgroup_bytes: |_| 32,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// RMS norm of single heads, in place: each row is a head.
pub static RMS_NORM_HEADS: Kernel<NormArgs> = Kernel {
    name: "rms_norm_heads",
    source: "norm.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("w", Element::F32, |a| a.n.into()),
    ],
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_rows.div_ceil(4), 1, 1],
};

const ROPE_BUFFERS: &[Buffer<RopeArgs>] = &[
    changes("x", Element::F32, |a| {
        product(&[a.n_rows, a.n_head, a.head_dim])
    }),
    reads("angles", Element::F32x2, |a| {
        product(&[a.n_rows, a.n_dims / 2])
    }),
];

/// Rotates pairs of adjacent dimensions.
pub static ROPE_NORM: Kernel<RopeArgs> = Kernel {
    name: "rope_norm",
    source: "rope.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: ROPE_BUFFERS,
    threads: 128,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [(a.n_head * (a.n_dims / 2)).div_ceil(128), a.n_rows, 1],
};

/// Rotates pairs that are half of the rotated dimensions apart.
pub static ROPE_NEOX: Kernel<RopeArgs> = Kernel {
    name: "rope_neox",
    ..ROPE_NORM
};

const GATE_BUFFERS: &[Buffer<ElementwiseArgs>] = &[
    changes("gate", Element::F32, |a| a.n.into()),
    reads("up", Element::F32, |a| a.n.into()),
];

/// `gate = silu(gate)·up`.
pub static SILU_MUL: Kernel<ElementwiseArgs> = Kernel {
    name: "silu_mul",
    source: "elementwise.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: GATE_BUFFERS,
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), 1, 1],
};

/// `gate = gelu(gate)·up`.
pub static GELU_MUL: Kernel<ElementwiseArgs> = Kernel {
    name: "gelu_mul",
    ..SILU_MUL
};

/// `gate = g·σ(1.702·g)·(u + 1)` with `g = min(gate, 7)` and `u` = `up` clamped to ±7.
pub static SWIGLU_OAI: Kernel<ElementwiseArgs> = Kernel {
    name: "swiglu_oai",
    ..SILU_MUL
};

/// `x = gelu(x)`.
pub static GELU: Kernel<ElementwiseArgs> = Kernel {
    name: "gelu",
    buffers: &[changes("x", Element::F32, |a| a.n.into())],
    ..SILU_MUL
};

/// `x = max(x, 0)²`.
pub static SQUARED_RELU: Kernel<ElementwiseArgs> = Kernel {
    name: "squared_relu",
    ..GELU
};

/// `y += scale·x`.
pub static ADD_SCALED: Kernel<AddScaledArgs> = Kernel {
    name: "add_scaled",
    source: "elementwise.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("y", Element::F32, |a| a.n.into()),
        reads("x", Element::F32, |a| a.n.into()),
    ],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), 1, 1],
};

/// Adds a bias to every row.
pub static ADD_BIAS: Kernel<AddBiasArgs> = Kernel {
    name: "add_bias",
    source: "elementwise.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("bias", Element::F32, |a| a.n.into()),
    ],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), a.n_rows, 1],
};

/// Adds rows, each multiplied by the sigmoid of its gate.
pub static ADD_GATED: Kernel<AddGatedArgs> = Kernel {
    name: "add_gated",
    source: "elementwise.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("gate", Element::F32, |a| a.n_rows.into()),
    ],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), a.n_rows, 1],
};

/// Scales and caps logits, see `LogitTransform`.
pub static FINISH_LOGITS: Kernel<FinishLogitsArgs> = Kernel {
    name: "finish_logits",
    source: "elementwise.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[changes("x", Element::F32, |a| a.n.into())],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), 1, 1],
};

/// Chooses experts and their weights.
pub static ROUTE: Kernel<RouteArgs> = Kernel {
    name: "route",
    source: "experts.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("router", Element::F32, |a| product(&[a.n_rows, a.n_expert])),
        reads("bias", Element::F32, |a| a.n_expert.into()),
        changes("chosen", Element::U32, |a| product(&[a.n_rows, a.n_used])),
        writes("weights", Element::F32, |a| product(&[a.n_rows, a.n_used])),
    ],
    threads: 32,
    threadgroup_bytes: |_| 2 * MAX_EXPERTS * 4,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// Lists the rows of each expert.
pub static EXPERT_ROWS: Kernel<ExpertRowsArgs> = Kernel {
    name: "expert_rows",
    source: "experts.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("chosen", Element::U32, |a| a.n_chosen.into()),
        writes("counts", Element::U32, |a| a.n_expert.into()),
        writes("lists", Element::U32, |a| {
            product(&[a.n_expert, a.n_chosen])
        }),
    ],
    threads: 32,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n_expert, 1, 1],
};

/// Adds to each product of an expert that expert's bias.
pub static ADD_EXPERT_BIAS: Kernel<AddExpertBiasArgs> = Kernel {
    name: "add_expert_bias",
    source: "experts.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        changes("y", Element::F32, |a| product(&[a.n_chosen, a.n])),
        reads("bias", Element::F32, |a| product(&[a.n_expert, a.n])),
        reads("chosen", Element::U32, |a| a.n_chosen.into()),
    ],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), a.n_chosen, 1],
};

/// Sums the outputs of a row's experts.
pub static COMBINE_EXPERTS: Kernel<CombineExpertsArgs> = Kernel {
    name: "combine_experts",
    source: "experts.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n_used, a.n])),
        reads("weights", Element::F32, |a| product(&[a.n_rows, a.n_used])),
        writes("y", Element::F32, |a| product(&[a.n_rows, a.n])),
    ],
    threads: 256,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.n.div_ceil(256), a.n_rows, 1],
};

/// Index of the largest value of each row.
pub static ARGMAX: Kernel<SampleArgs> = Kernel {
    name: "argmax",
    source: "sample.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        writes("index", Element::U32, |a| a.n_rows.into()),
    ],
    threads: 256,
    threadgroup_bytes: |_| 64,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// Softmax of each row.
pub static SOFTMAX: Kernel<SampleArgs> = Kernel {
    name: "softmax",
    source: "sample.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[changes("x", Element::F32, |a| product(&[a.n_rows, a.n]))],
    threads: 256,
    threadgroup_bytes: |_| 64,
    grid: |a, _| [a.n_rows, 1, 1],
};

/// The `k` largest of each [`SORTED`] values. If `k` is at most half of that, [`TOP_K_PAIRS`] can
/// then reduce their number.
pub static TOP_K: Kernel<TopKArgs> = Kernel {
    name: "top_k",
    source: "sample.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        writes("top_values", Element::F32, |a| {
            product(&[a.n_rows, a.n.div_ceil(SORTED), a.k])
        }),
        writes("top_indices", Element::U32, |a| {
            product(&[a.n_rows, a.n.div_ceil(SORTED), a.k])
        }),
    ],
    threads: 256,
    threadgroup_bytes: |_| 2 * SORTED * 4,
    grid: |a, _| [a.n.div_ceil(SORTED), a.n_rows, 1],
};

/// The `k` largest of each [`SORTED`] pairs of value and index.
pub static TOP_K_PAIRS: Kernel<TopKArgs> = Kernel {
    name: "top_k_pairs",
    buffers: &[
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n])),
        reads("x_indices", Element::U32, |a| product(&[a.n_rows, a.n])),
        writes("top_values", Element::F32, |a| {
            product(&[a.n_rows, a.n.div_ceil(SORTED), a.k])
        }),
        writes("top_indices", Element::U32, |a| {
            product(&[a.n_rows, a.n.div_ceil(SORTED), a.k])
        }),
    ],
    ..TOP_K
};

/// `t = x·Aᵀ` of an adapter.
pub static LORA_A: Kernel<LoraArgs> = Kernel {
    name: "lora_a",
    source: "lora.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("a", Element::F32, |a| product(&[a.rank, a.n_in])),
        reads("x", Element::F32, |a| product(&[a.n_rows, a.n_in])),
        writes("t", Element::F32, |a| product(&[a.n_rows, a.rank])),
    ],
    threads: 32,
    threadgroup_bytes: NO_MEMORY,
    grid: |a, _| [a.rank, a.n_rows, 1],
};

/// Values of the columns that a product computes of all rows of `B`, which are `b_stride` apart.
fn b_len(a: &LoraArgs) -> u64 {
    product(&[a.rank - 1, a.b_stride]) + u64::from(a.n_out)
}

/// `y += scale·t·B` of an adapter.
pub static LORA_B: Kernel<LoraArgs> = Kernel {
    name: "lora_b",
    buffers: &[
        reads("b", Element::F32, b_len),
        reads("t", Element::F32, |a| product(&[a.n_rows, a.rank])),
        changes("y", Element::F32, |a| product(&[a.n_rows, a.n_out])),
    ],
    threads: 256,
    grid: |a, _| [a.n_out.div_ceil(256), a.n_rows, 1],
    ..LORA_A
};

/// Adds an adapter's terms to rows of the embedding table, `n_in` is the number of tokens.
pub static LORA_EMBED: Kernel<LoraArgs> = Kernel {
    name: "lora_embed",
    buffers: &[
        reads("a", Element::F32, |a| product(&[a.rank, a.n_in])),
        reads("b", Element::F32, b_len),
        reads("tokens", Element::U32, |a| a.n_rows.into()),
        changes("x", Element::F32, |a| product(&[a.n_rows, a.n_out])),
    ],
    ..LORA_B
};

/// Adds the terms of chosen experts to their products. `terms` has four numbers per expert: the
/// index of its `A` among the adapter's values, that of its `B`, the rank (0 without a term), and
/// the bits of the scale.
pub static LORA_EXPERTS: Kernel<LoraExpertsArgs> = Kernel {
    name: "lora_experts",
    source: "lora.metal",
    per_format: false,
    variants: NO_VARIANTS,
    buffers: &[
        reads("values", Element::F32, |a| a.n_values.into()),
        reads("x", Element::F32, |a| {
            product(&[a.n_chosen / a.choices_per_row, a.n_in])
        }),
        reads("chosen", Element::U32, |a| a.n_chosen.into()),
        reads("terms", Element::U32, |a| product(&[4, a.n_expert])),
        changes("y", Element::F32, |a| product(&[a.n_chosen, a.n_out])),
    ],
    threads: 256,
    threadgroup_bytes: |_| 32,
    grid: |a, _| [a.n_chosen, 1, 1],
};

/// Table entries of all kernels.
pub fn declarations() -> Vec<Declaration> {
    vec![
        MATVEC.declaration(),
        MATVEC_EXPERTS.declaration(),
        MATMUL.declaration(),
        MATMUL_EXPERTS.declaration(),
        EMBED.declaration(),
        ATTENTION_DECODE.declaration(),
        ATTENTION_MERGE.declaration(),
        ATTENTION_PROMPT.declaration(),
        APPEND.declaration(),
        HADAMARD.declaration(),
        RMS_NORM.declaration(),
        RMS_NORM_ADD.declaration(),
        LAYER_NORM.declaration(),
        LAYER_NORM_ADD.declaration(),
        RMS_NORM_HEADS.declaration(),
        ROPE_NORM.declaration(),
        ROPE_NEOX.declaration(),
        SILU_MUL.declaration(),
        GELU_MUL.declaration(),
        SWIGLU_OAI.declaration(),
        GELU.declaration(),
        SQUARED_RELU.declaration(),
        ADD_SCALED.declaration(),
        ADD_BIAS.declaration(),
        ADD_GATED.declaration(),
        FINISH_LOGITS.declaration(),
        ROUTE.declaration(),
        EXPERT_ROWS.declaration(),
        ADD_EXPERT_BIAS.declaration(),
        COMBINE_EXPERTS.declaration(),
        ARGMAX.declaration(),
        SOFTMAX.declaration(),
        TOP_K.declaration(),
        TOP_K_PAIRS.declaration(),
        LORA_A.declaration(),
        LORA_B.declaration(),
        LORA_EMBED.declaration(),
        LORA_EXPERTS.declaration(),
    ]
}
