//! Table of the kernels: the buffers that each reads and writes, their sizes for a given
//! problem, and the number of threads. The host dispatches by this table, and `tests/metal` runs
//! and checks the shaders by it.
//!
//! A kernel's last buffer is its arguments, a structure of the same name and fields in its source.

mod attention;
mod elementwise;
mod experts;
mod lora;
mod products;
mod recurrent;
mod sample;

pub use attention::*;
pub use elementwise::*;
pub use experts::*;
pub use lora::*;
pub use products::*;
pub use recurrent::*;
pub use sample::*;

use crate::quant::DType;
use bytemuck::{Pod, Zeroable};

/// Positions per page.
pub const PAGE_POSITIONS: u32 = 64;
/// Positions per split of keys in [`ATTENTION_DECODE`].
pub const SPLIT: u32 = 2 * PAGE_POSITIONS;
/// Most experts of a layer, and most groups of them.
pub const MAX_EXPERTS: u32 = 512;
/// See [`MAX_EXPERTS`].
pub const MAX_GROUPS: u32 = 32;
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
    /// Rows of a sequence: the first, their number, the index of its first page of states, and the
    /// number of these: four `uint`.
    Slot,
    /// Address of a page of recurrent layers, its position as `uint`, and four bytes without meaning.
    State,
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
            Element::Slot => "Slot",
            Element::State => "State",
        }
    }

    /// Size of an element in bytes.
    pub fn size(self) -> u64 {
        match self {
            Element::Weights => 1,
            Element::F32 | Element::U32 => 4,
            Element::F32x2 | Element::Row | Element::Tile | Element::Page => 8,
            Element::Slot | Element::State => 16,
        }
    }

    /// Whether kernels with such a buffer access pages.
    #[cfg(feature = "webgpu")]
    pub(crate) fn has_addresses(self) -> bool {
        matches!(self, Element::Page | Element::State)
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
    MatmulExpertsArgs {
        n_in: u32, n_out: u32, n_rows: u32, n_chosen: u32, n_expert: u32, choices_per_row: u32, row_bytes: u32
    }
    EmbedArgs { n_embd: u32, n_vocab: u32, n_rows: u32, row_bytes: u32, scale: f32 }
    AttentionArgs {
        n_rows: u32, n_head: u32, n_head_kv: u32, head_dim: u32, head_dim_v: u32, key_offset: u32, value_offset: u32,
        key_bits: u32, value_bits: u32, window: u32, chunked: u32, n_pages: u32, n_splits: u32, n_tiles: u32, scale: f32, softcap: f32,
        alibi: f32
    }
    AppendArgs {
        n_rows: u32, n_pages: u32, n_head_kv: u32, head_dim: u32, head_dim_v: u32, key_offset: u32, value_offset: u32,
        key_bits: u32, value_bits: u32
    }
    HeadsArgs {
        n_rows: u32, n_pages: u32, n_head: u32, n_head_kv: u32, head_dim: u32, head_dim_v: u32, key_offset: u32,
        value_offset: u32, n_dims: u32, n_norm: u32, eps: f32
    }
    HadamardArgs { n: u32, n_rows: u32, log_side: u32, factor: f32 }
    NormArgs { n: u32, n_rows: u32, eps: f32 }
    NormAddArgs { n: u32, n_rows: u32, eps: f32, branch_scale: f32 }
    RopeArgs { n_rows: u32, n_head: u32, head_dim: u32, first: u32, n_dims: u32 }
    ElementwiseArgs { n: u32 }
    FunctionArgs { n: u32, function: u32, a: f32, b: f32, c: f32, d: f32 }
    GateHeadsArgs { n: u32, n_head: u32, n_rows: u32, gate_value: u32, gate_head: u32, gate_row: u32, function: u32 }
    CopyHeadsArgs { n: u32, n_head: u32, n_rows: u32, x_head: u32, x_row: u32, y_head: u32, y_row: u32 }
    AddScaledArgs { n: u32, scale: f32 }
    AddBiasArgs { n: u32, n_rows: u32 }
    AddGatedArgs { n: u32, n_rows: u32 }
    AddExpertBiasArgs { n: u32, n_chosen: u32, n_expert: u32 }
    FinishLogitsArgs { n: u32, scale: f32, softcap: f32 }
    RouteArgs {
        n_rows: u32, n_expert: u32, n_used: u32, n_group: u32, n_group_used: u32, gating: u32, normalise: u32,
        scale: f32
    }
    ExpertRowsArgs { n_chosen: u32, n_expert: u32 }
    CombineExpertsArgs { n: u32, n_rows: u32, n_used: u32 }
    CausalConvArgs {
        n_rows: u32, n_longest: u32, n_in: u32, first: u32, n_channel: u32, n_tap: u32, n_bias: u32, n_out: u32,
        part: u32, gated: u32, state: u32, feeds: u32, n_slots: u32, n_states: u32
    }
    KeepFeedsArgs { n_rows: u32, n_feed: u32, feeds: u32, n_slots: u32, n_states: u32 }
    DeltaFeedArgs {
        n_rows: u32, n_feed: u32, n_head: u32, n_head_k: u32, head_dim_k: u32, n_rate: u32, fused: u32, bound: f32,
        length_eps: f32
    }
    ScanArgs {
        n_rows: u32, n_feed: u32, n_head: u32, n_head_k: u32, head_dim_k: u32, head_dim_v: u32, q: u32, k: u32, v: u32,
        beta: u32, rate: u32, by_channel: u32, tiled: u32, columns: u32, state: u32, feeds: u32, n_slots: u32,
        n_states: u32
    }
    ChannelScanArgs {
        n_rows: u32, n_channel: u32, n_state: u32, n_block: u32, state: u32, feeds: u32, n_slots: u32, n_states: u32
    }
    TimeStepsArgs { n_rows: u32, n_in: u32, n_feed: u32, n_head: u32 }
    GatedGroupsArgs { n: u32, n_rows: u32, n_group: u32, n_in: u32, n_norm: u32, eps: f32 }
    GatedNormArgs { n: u32, n_rows: u32, eps: f32, sigmoid: u32 }
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
    /// Name of its function, as in [`Kernel::name`].
    pub name: &'static str,
    /// Format of its weights; F32 without.
    pub format: DType,
    /// Variant number; 0 without.
    pub variant: u32,
    /// Whether it is one of several that differ in the format.
    pub per_format: bool,
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

impl Dispatch {
    /// Its kernel's full name in the library.
    pub fn kernel(&self) -> String {
        full_name(
            self.name,
            self.per_format.then_some(self.format),
            self.variant,
        )
    }
}

/// Name of an instance in the library; without a variant, that is 0.
fn full_name(name: &str, format: Option<DType>, variant: u32) -> String {
    let mut full = String::from(name);
    if let Some(format) = format {
        full += &format!("_{}", format.to_string().to_lowercase());
    }
    if variant != 0 {
        full += &format!("_{variant}");
    }
    full
}

impl<A: Args> Kernel<A> {
    /// Name in the library: `matvec_q4_k_1`. Kernels without formats or variants ignore `format` or
    /// `variant`.
    pub fn full_name(&self, format: DType, variant: u32) -> String {
        full_name(
            self.name,
            self.per_format.then_some(format),
            if self.variants.is_empty() { 0 } else { variant },
        )
    }

    /// The dispatch for a problem.
    pub fn dispatch(&self, format: DType, variant: u32, args: &A) -> Dispatch {
        Dispatch {
            name: self.name,
            format: if self.per_format { format } else { DType::F32 },
            variant: if self.variants.is_empty() { 0 } else { variant },
            per_format: self.per_format,
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

/// Table entries of kernels that do the work of several others, which only WGSL has.
#[cfg(feature = "webgpu")]
pub fn joined_declarations() -> Vec<Declaration> {
    vec![HEADS.declaration(), ATTENTION_SINGLE.declaration()]
}

/// Table entries of all kernels that each language has.
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
        UNARY.declaration(),
        GATED.declaration(),
        ADD_SCALED.declaration(),
        ADD_BIAS.declaration(),
        ADD_GATED.declaration(),
        GATE_HEADS.declaration(),
        COPY_HEADS.declaration(),
        FINISH_LOGITS.declaration(),
        ROUTE.declaration(),
        EXPERT_ROWS.declaration(),
        ADD_EXPERT_BIAS.declaration(),
        COMBINE_EXPERTS.declaration(),
        CAUSAL_CONV.declaration(),
        KEEP_FEEDS.declaration(),
        DELTA_FEED.declaration(),
        DELTA_RULE.declaration(),
        SSM_SCAN.declaration(),
        CHANNEL_SCAN.declaration(),
        TIME_STEPS.declaration(),
        GATED_GROUPS.declaration(),
        GATED_NORM_HEADS.declaration(),
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
