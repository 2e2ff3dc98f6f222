//! Composition of shaders: WGSL has neither templates nor includes, so a kernel instance is a text
//! of its own, put together from the files in `src/wgsl_shaders`.
//!
//! Lines that begin with `//!` are directives:
//!
//! | directive | meaning |
//! |---|---|
//! | `use a b`, `include a` | the text of other files |
//! | `each a` | the text of a file once for each matrix; names of the second one end with `_1` |
//! | `kernel k`, `kernel-group k l` | what follows, to the next such line, is of these kernels only |
//! | `format f`, `formats f g` | likewise of weight formats |
//! | `for v < N` … `end` | the lines once for each number below `N`, with `$v` as the number |
//! | `if C` … `else` … `end` | the lines if the constant `C` is not 0, or if it is |
//!
//! `$NAME` is a constant of the instance. Bindings and the arguments' structure come from the table
//! of kernels, so that a shader cannot declare others than the host binds.

use crate::gpu::kernels::{
    Access, Declaration, Element, FORMATS, HEAD_DIMS, HEADS_VARIANTS, KEY_DIMS, MATVEC, MAX_VALUES,
    declarations, joined_declarations,
};
use crate::quant::DType;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::LazyLock;

/// Name and text of each file.
pub const FILES: &[(&str, &str)] = &[
    ("common", include_str!("../../wgsl_shaders/common.wgsl")),
    ("blocks", include_str!("../../wgsl_shaders/blocks.wgsl")),
    ("unscaled", include_str!("../../wgsl_shaders/unscaled.wgsl")),
    ("gates", include_str!("../../wgsl_shaders/gates.wgsl")),
    ("acts", include_str!("../../wgsl_shaders/acts.wgsl")),
    ("tile", include_str!("../../wgsl_shaders/tile.wgsl")),
    ("pages", include_str!("../../wgsl_shaders/pages.wgsl")),
    ("slabs", include_str!("../../wgsl_shaders/slabs.wgsl")),
    ("matvec", include_str!("../../wgsl_shaders/matvec.wgsl")),
    ("product", include_str!("../../wgsl_shaders/product.wgsl")),
    ("matmul", include_str!("../../wgsl_shaders/matmul.wgsl")),
    ("matrix", include_str!("../../wgsl_shaders/matrix.wgsl")),
    ("embed", include_str!("../../wgsl_shaders/embed.wgsl")),
    ("to_half", include_str!("../../wgsl_shaders/to_half.wgsl")),
    ("heads", include_str!("../../wgsl_shaders/heads.wgsl")),
    ("append", include_str!("../../wgsl_shaders/append.wgsl")),
    ("hadamard", include_str!("../../wgsl_shaders/hadamard.wgsl")),
    ("scores", include_str!("../../wgsl_shaders/scores.wgsl")),
    (
        "attention_decode",
        include_str!("../../wgsl_shaders/attention_decode.wgsl"),
    ),
    (
        "attention_begin",
        include_str!("../../wgsl_shaders/attention_begin.wgsl"),
    ),
    (
        "attention_halves",
        include_str!("../../wgsl_shaders/attention_halves.wgsl"),
    ),
    (
        "attention_end",
        include_str!("../../wgsl_shaders/attention_end.wgsl"),
    ),
    (
        "attention_prompt",
        include_str!("../../wgsl_shaders/attention_prompt.wgsl"),
    ),
    ("norm", include_str!("../../wgsl_shaders/norm.wgsl")),
    ("rope", include_str!("../../wgsl_shaders/rope.wgsl")),
    (
        "elementwise",
        include_str!("../../wgsl_shaders/elementwise.wgsl"),
    ),
    ("experts", include_str!("../../wgsl_shaders/experts.wgsl")),
    (
        "recurrent",
        include_str!("../../wgsl_shaders/recurrent.wgsl"),
    ),
    ("sample", include_str!("../../wgsl_shaders/sample.wgsl")),
    ("lora", include_str!("../../wgsl_shaders/lora.wgsl")),
];

/// A kernel of the table with all that its text depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Instance {
    /// Name in the table of kernels.
    pub name: &'static str,
    /// Format of its weights; F32 without.
    pub format: DType,
    /// Variant number; 0 without.
    pub variant: u32,
    /// Whether rows of weights and activations may be read as vectors, see `Instance::vectors`.
    pub wide: bool,
    /// Buffers in which pages lie; 0 if the kernel reads none.
    pub slabs: u32,
    /// Whether pages are in f16, of which attention to generated tokens then reads vectors.
    pub halves: bool,
    /// Threads that share a row of weights, in products of few rows: 32, 64 or 128, otherwise 0.
    pub lanes: u32,
    /// Weight rows per team of threads, in products of few rows.
    pub outs: u32,
    /// Formats of further matrices of a matvec, whose products are computed, too.
    pub more: [Option<DType>; 2],
    /// Kernel of the activation whose gate is the product with the first of two matrices, and whose
    /// result is stored instead.
    pub gate: Option<&'static str>,
    /// Cooperative matrices with which it multiplies.
    pub matrix: Option<Matrix>,
}

/// Cooperative matrices of a GPU: subgroups multiply square ones of `f16` and sum in `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// Rows, and columns.
    pub side: u32,
    /// Threads of a subgroup.
    pub subgroup: u32,
}

impl Matrix {
    /// Subgroups of a workgroup.
    const SUBGROUPS: u32 = 4;
    /// Matrices of a subgroup: those of different weight rows, and of different activation rows.
    const BLOCK: [u32; 2] = [4, 2];
    /// Columns of the panels.
    const COLUMNS: u32 = 32;

    /// Threads of a workgroup.
    pub(super) fn threads(self) -> u32 {
        Matrix::SUBGROUPS * self.subgroup
    }

    /// Weight rows and activation rows of a workgroup, whose subgroups are two by two.
    pub(super) fn tile(self) -> [u32; 2] {
        Matrix::BLOCK.map(|matrices| 2 * matrices * self.side)
    }

    /// Vectors of four `f16` of the panels of weights and of activations, whose rows have two behind
    /// their columns.
    fn panels(self) -> [u32; 2] {
        self.tile().map(|rows| rows * (Matrix::COLUMNS / 4 + 2))
    }

    /// Numbers of results that wait to be written.
    fn results(self) -> u32 {
        Matrix::SUBGROUPS * self.side * self.side
    }

    /// Bytes of a workgroup's memory.
    pub(super) fn workgroup_bytes(self) -> u32 {
        let [w, x] = self.panels();
        8 * (w + x) + 4 * self.results()
    }

    /// Parts of 16 columns that each thread reads of a panel of weights and of one of activations.
    fn loads(self) -> [u32; 2] {
        let parts = Matrix::COLUMNS / 16;
        self.tile().map(|rows| rows * parts / self.threads())
    }

    /// Whether the kernel can be written with them: the threads share the panels' parts evenly.
    pub(super) fn fits(self) -> bool {
        let parts = Matrix::COLUMNS / 16;
        let even = |rows: u32| (rows * parts).is_multiple_of(self.threads());
        self.tile().into_iter().all(even)
    }

    fn constant(self, name: &str) -> Option<u32> {
        Some(match name {
            "SIDE" => self.side,
            "SUBGROUP" => self.subgroup,
            "THREADS" => self.threads(),
            "BLOCK_OUTS" => Matrix::BLOCK[0],
            "BLOCK_ROWS" => Matrix::BLOCK[1],
            "PANEL_OUTS" => self.tile()[0],
            "PANEL_ROWS" => self.tile()[1],
            "W_PANEL" => self.panels()[0],
            "X_PANEL" => self.panels()[1],
            "W_LOADS" => self.loads()[0],
            "X_LOADS" => self.loads()[1],
            "RESULTS" => self.results(),
            _ => return None,
        })
    }

    /// Whether calls of a kernel with such weights use matrices. Weights in `f32` keep their bits.
    pub(super) fn serve(name: &str, format: DType) -> bool {
        name.starts_with("matmul") && format != DType::F32
    }
}

/// Kernels of activations that can be the end of two products.
pub(super) const GATES: &[&str] = &["silu_mul", "gelu_mul", "swiglu_oai"];

/// What is renamed for the further matrices besides functions.
const OF_MATRIX: &[&str] = &["w", "y", "n_out", "row_bytes", "w_at", "y_at"];

/// Threads that share a row of `n_in` weights, as measured: more have less to do each, but more sums
/// to add at the end.
pub(super) fn lanes(n_in: u32) -> u32 {
    match n_in {
        0..2048 => 32,
        2048..6144 => 64,
        _ => 128,
    }
}

/// Whether a kernel is a norm that has a text with vectors.
pub(super) fn is_rms_norm(kernel: &str) -> bool {
    matches!(kernel, "rms_norm" | "rms_norm_add")
}

/// Whether a kernel is attention of generated tokens, which has a text of its own for pages in f16.
pub(super) fn attends_generated(kernel: &str) -> bool {
    matches!(kernel, "attention_decode" | "attention_single")
}

/// Table entries, composed once.
static DECLARATIONS: LazyLock<Vec<Declaration>> = LazyLock::new(|| {
    let mut all = declarations();
    all.extend(joined_declarations());
    all
});

/// The table entry of a kernel.
pub fn declaration(name: &str) -> Option<&'static Declaration> {
    static BY_NAME: LazyLock<HashMap<&str, &Declaration>> =
        LazyLock::new(|| DECLARATIONS.iter().map(|d| (d.name, d)).collect());
    BY_NAME.get(name).copied()
}

/// Instances of all kernels, with and without vectors where a kernel has both, with pages in this many
/// buffers, and with matrices, too, where there are some.
pub fn instances(slabs: u32, matrix: Option<Matrix>) -> Vec<Instance> {
    let mut all = Vec::new();
    for d in DECLARATIONS.iter() {
        let has = |element| d.buffers.iter().any(|b| b.1 == element);
        let formats = if has(Element::Weights) {
            FORMATS
        } else {
            &FORMATS[..1]
        };
        let variants = match d.name {
            "matvec" => MATVEC.variants,
            "attention_decode" | "attention_single" | "attention_prompt" => HEAD_DIMS,
            "heads" => HEADS_VARIANTS,
            "delta_rule" | "ssm_scan" => KEY_DIMS,
            _ => &[0],
        };
        for (&format, &variant) in formats
            .iter()
            .flat_map(|f| variants.iter().map(move |v| (f, v)))
        {
            let floats = has(Element::Weights) && format.block().0 == 1;
            let norms = is_rms_norm(d.name);
            let wides = match floats || norms {
                true => &[false, true][..],
                false => &[true],
            };
            let lanes = match d.name.starts_with("matvec") {
                true => &[32, 64, 128][..],
                false => &[0],
            };
            let both = wides
                .iter()
                .flat_map(|&wide| lanes.iter().map(move |&lanes| (wide, lanes)));
            let single = both.map(|(wide, lanes)| Instance {
                name: d.name,
                format,
                variant,
                wide: wide && (norms || has(Element::Weights)),
                slabs: if d.buffers.iter().any(|b| b.1.has_addresses()) {
                    slabs
                } else {
                    0
                },
                halves: false,
                lanes,
                outs: 4,
                more: [None; 2],
                gate: None,
                matrix: None,
            });
            let first = all.len();
            all.extend(single);
            if attends_generated(d.name) {
                all.push(Instance {
                    halves: true,
                    ..all[first]
                });
            }
            if d.name == "matvec" {
                let three = Instance {
                    name: d.name,
                    format,
                    variant,
                    wide: true,
                    slabs: 0,
                    halves: false,
                    lanes: 64,
                    outs: 4,
                    more: [Some(format), Some(DType::Q6_K)],
                    gate: None,
                    matrix: None,
                };
                let gated = |gate| Instance {
                    more: [Some(DType::Q6_K), None],
                    gate: Some(gate),
                    ..three
                };
                all.push(three);
                all.extend(GATES.iter().map(|&gate| gated(gate)));
                if variant == 1 {
                    all.push(Instance { outs: 8, ..three });
                }
            }
        }
    }
    if matrix.is_some() {
        let served = all.iter().filter(|i| Matrix::serve(i.name, i.format));
        let with: Vec<Instance> = served.map(|i| Instance { matrix, ..*i }).collect();
        all.extend(with);
    }
    all
}

impl Instance {
    /// Its name in messages.
    pub fn full_name(&self) -> String {
        let mut name = self.name.to_string();
        if self.is_product() || self.name == "embed" {
            name += &format!("_{}", self.format.to_string().to_lowercase());
        }
        for format in self.more.iter().flatten() {
            name += &format!("_{}", format.to_string().to_lowercase());
        }
        if self.variant != 0 {
            name += &format!("_{}", self.variant);
        }
        if self.wide {
            name += "_wide";
        }
        if let Some(gate) = self.gate {
            name += &format!("_{gate}");
        }
        if self.outs > 4 {
            name += &format!("_outs{}", self.outs);
        }
        if self.lanes != 0 {
            name += &format!("_lanes{}", self.lanes);
        }
        if self.halves {
            name += "_halves";
        }
        if self.slabs != 0 {
            name += &format!("_slabs{}", self.slabs);
        }
        if let Some(matrix) = self.matrix {
            name += &format!("_matrix{}", matrix.side);
        }
        name
    }

    /// Whether activations are multiplied by weights.
    pub(super) fn is_product(&self) -> bool {
        self.name.starts_with("matvec") || self.name.starts_with("matmul")
    }

    /// Whether the binding `element` has vectors of 16 bytes, to which its offset then has to be
    /// aligned.
    pub(super) fn vectors(&self, element: Element, access: Access) -> bool {
        match element {
            Element::Weights => match self.format {
                DType::Q4_K | DType::Q5_K => true,
                DType::F32 | DType::F16 | DType::BF16 => self.wide,
                _ => false,
            },
            Element::F32 if is_rms_norm(self.name) => self.wide,
            Element::F32 => self.wide && self.is_product() && access == Access::Read,
            _ => false,
        }
    }

    /// Parts of a row that a thread takes at a time as numbers with a scale and an offset; 0 for
    /// formats that have none.
    fn unit(&self) -> u32 {
        match self.format {
            DType::Q4_K | DType::Q6_K => 2,
            DType::Q8_0 | DType::Q4_0 => 1,
            _ => 0,
        }
    }

    /// [`Instance::vectors`] with weights in this format.
    pub(super) fn vectors_of(&self, format: DType, element: Element, access: Access) -> bool {
        Instance { format, ..*self }.vectors(element, access)
    }

    /// Whether it writes to pages.
    pub(super) fn writes_pages(&self) -> bool {
        matches!(
            self.name,
            "append"
                | "heads"
                | "causal_conv"
                | "keep_feeds"
                | "delta_rule"
                | "ssm_scan"
                | "channel_scan"
        )
    }

    /// Query heads that a workgroup takes in attention of generated tokens.
    pub(super) fn heads_each(&self) -> u32 {
        let most = if self.halves { 512 } else { 1024 };
        most / self.variant.clamp(1, MAX_VALUES)
    }

    fn constant(&self, name: &str) -> Option<String> {
        let rows = self.variant.max(1);
        let values = rows.min(MAX_VALUES);
        let number = match name {
            "ROWS" => rows,
            "OUTS" => self.outs,
            "LANES" => self.lanes,
            "TEAMS" => 128 / self.lanes.max(1),
            "SUMS" => 128 * rows * self.outs,
            // Parts of a row that a thread takes at a time, where `unscaled.wgsl` has the format.
            "UNSCALED" => u32::from(self.unit() > 0),
            "UNIT" => self.unit(),
            "GATED" => u32::from(self.gate.is_some()),
            "GATE" => return self.gate.map(|gate| format!("of_{gate}")),
            "SECOND" => u32::from(self.more[0].is_some()),
            "THIRD" => u32::from(self.more[1].is_some()),
            "WIDE" => u32::from(self.wide),
            "W_VECTORS" => u32::from(self.vectors(Element::Weights, Access::Read)),
            "ADDS" => u32::from(self.name == "rms_norm_add"),
            "DELTA" => u32::from(self.name == "delta_rule"),
            // Vectors of a thread, of an eighth of a column of the state each.
            "STATE_VECTORS" => rows / 32,
            "SINGLE" => u32::from(self.name == "attention_single"),
            "NEOX" => self.variant & 1,
            "NORMS" => self.variant >> 1,
            "SLABS" => self.slabs,
            "LAST_SLAB" => self.slabs.max(1) - 1,
            // Attention: the widest head, and of values; of generated tokens, query heads per
            // workgroup, vectors of these and of a thread; rows of a tile of prompts.
            "D" => self.variant,
            "VALUES" => values,
            "G" => self.heads_each(),
            "HALVES" => u32::from(self.halves),
            "WIDTH" => rows / 128,
            "VECTORS" => self.heads_each() * rows / 4,
            "TILE_ROWS" => 4096 / values,
            // Of the output of a thread: rows, and columns as vectors.
            "ROWS_EACH" => 512 / values,
            "VECTORS_EACH" => values / 64,
            "KEYS" => 1024 / values,
            "SCORES" if self.halves => 64 * self.heads_each(),
            "SCORES" => 4096 / values * 65,
            "COLUMNS" => {
                let columns = match self.name {
                    "matmul_experts" => "select(0u, p.n_in, first < count)",
                    _ => "p.n_in",
                };
                return Some(columns.to_string());
            }
            _ => match name.parse() {
                Ok(n) => n,
                Err(_) => self.matrix?.constant(name)?,
            },
        };
        Some(number.to_string())
    }

    /// The module's text, with `main` as its entry point.
    ///
    /// # Errors
    /// A description of the directive that is wrong.
    pub fn source(&self) -> Result<String, String> {
        self.source_with(&[])
    }

    /// The text with others for some of [`FILES`], by their names.
    ///
    /// # Errors
    /// As [`Instance::source`].
    pub fn source_with(&self, changes: &[(String, String)]) -> Result<String, String> {
        let file = |name: &str| match changes.iter().find(|(n, _)| n == name) {
            Some((_, text)) => Some(text.as_str()),
            None => FILES
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, text)| *text),
        };
        let begins = |line: &str| {
            line.starts_with("//! kernel") && line.split(' ').skip(2).any(|name| name == self.name)
        };
        let (name, _) = FILES
            .iter()
            .filter(|(name, _)| (*name == "matrix") == self.matrix.is_some())
            .find(|(name, _)| file(name).is_some_and(|text| text.lines().any(begins)))
            .ok_or_else(|| format!("no file has the kernel {}", self.name))?;
        let mut text = self.declarations()?;
        let mut composer = Composer {
            instance: self,
            file: &file,
            numbers: Vec::new(),
        };
        composer.file("common", &mut text)?;
        composer.file(name, &mut text)?;
        Ok(text)
    }

    /// The arguments' structure and the bindings.
    fn declarations(&self) -> Result<String, String> {
        let d = declaration(self.name).ok_or_else(|| format!("no kernel {}", self.name))?;
        let mut text = String::new();
        if self.matrix.is_some() {
            text += "enable f16;\nenable wgpu_cooperative_matrix;\n";
        }
        text += "struct Arguments {\n";
        for (field, of) in d.fields {
            let _ = writeln!(text, "    {field}: {of},");
        }
        for (name, ..) in &d.buffers {
            let _ = writeln!(text, "    {name}_at: u32,");
        }
        for m in 1..=self.more.iter().flatten().count() {
            for field in ["n_out", "row_bytes", "w_at", "y_at"] {
                let _ = writeln!(text, "    {field}_{m}: u32,");
            }
        }
        text += "}\n@group(1) @binding(0) var<uniform> p: Arguments;\n";
        for (i, &(name, element, access)) in d.buffers.iter().enumerate() {
            let mode = match access {
                Access::Read => "read",
                Access::Write | Access::ReadWrite => "read_write",
            };
            let of = match element {
                Element::Weights if self.vectors(element, access) => "vec4<u32>",
                Element::F32 if self.vectors(element, access) => "vec4<f32>",
                Element::F32 => "f32",
                Element::F32x2 => "vec2<f32>",
                Element::U32 | Element::Weights => "u32",
                Element::Row | Element::Tile | Element::Page => "vec2<u32>",
                Element::Slot | Element::State => "vec4<u32>",
            };
            let _ = writeln!(
                text,
                "@group(0) @binding({i}) var<storage, {mode}> {name}: array<{of}>;"
            );
        }
        let mut binding = d.buffers.len();
        for (m, &format) in (1..).zip(self.more.iter().flatten()) {
            let of = match self.vectors_of(format, Element::Weights, Access::Read) {
                true => "vec4<u32>",
                false => "u32",
            };
            let _ = writeln!(
                text,
                "@group(0) @binding({binding}) var<storage, read> w_{m}: array<{of}>;\n\
                 @group(0) @binding({}) var<storage, read_write> y_{m}: array<f32>;",
                binding + 1
            );
            binding += 2;
        }
        let (mode, of) = match self.name {
            "append" => ("read_write", "atomic<u32>"),
            _ if self.writes_pages() => ("read_write", "u32"),
            _ if self.halves => ("read", "vec4<u32>"),
            _ => ("read", "u32"),
        };
        for slab in 0..self.slabs {
            let binding = d.buffers.len() as u32 + slab;
            let _ = writeln!(
                text,
                "@group(0) @binding({binding}) var<storage, {mode}> slab_{slab}: array<{of}>;"
            );
        }
        Ok(text)
    }
}

/// Carries out the directives of files.
struct Composer<'i, 'a> {
    instance: &'i Instance,
    file: &'a dyn Fn(&str) -> Option<&'a str>,
    /// Numbers of the loops around a line.
    numbers: Vec<(char, u32)>,
}

impl Composer<'_, '_> {
    fn file(&mut self, name: &str, out: &mut String) -> Result<(), String> {
        let text = (self.file)(name).ok_or_else(|| format!("no file {name}"))?;
        let mut lines = Vec::new();
        let mut of_ours = true;
        let format = self.instance.format.to_string().to_lowercase();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["//!", "kernel" | "kernel-group", ..] => {
                    of_ours = words[2..].contains(&self.instance.name);
                }
                ["//!", "format" | "formats", ..] => {
                    of_ours = words[2..].contains(&format.as_str());
                }
                _ if of_ours => lines.push(line),
                _ => {}
            }
        }
        self.lines(&lines, out)
            .map_err(|e| format!("{name}.wgsl: {e}"))
    }

    fn lines(&mut self, lines: &[&str], out: &mut String) -> Result<(), String> {
        let mut at = 0;
        while let Some(line) = lines.get(at) {
            at += 1;
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["//!", "use" | "include", ..] => {
                    for name in &words[2..] {
                        self.file(name, out)?;
                    }
                }
                ["//!", "each", name] => {
                    self.file(name, out)?;
                    for (m, &format) in (1..).zip(self.instance.more.iter().flatten()) {
                        let instance = Instance {
                            format,
                            ..*self.instance
                        };
                        let mut composer = Composer {
                            instance: &instance,
                            file: self.file,
                            numbers: Vec::new(),
                        };
                        let mut text = String::new();
                        composer.file(name, &mut text)?;
                        out.push_str(&renamed(&text, m));
                    }
                }
                ["//!", "if", constant] => {
                    let (otherwise, end) = block(&lines[at..], line)?;
                    let (first, second) = (&lines[at..at + otherwise], at + end);
                    let second = if otherwise == end {
                        &[]
                    } else {
                        &lines[at + otherwise + 1..second]
                    };
                    let chosen = if self.constant(constant)? == "0" {
                        second
                    } else {
                        first
                    };
                    self.lines(chosen, out)?;
                    at += end + 1;
                }
                ["//!", "for", variable, "<", count] => {
                    let (_, end) = block(&lines[at..], line)?;
                    let number: u32 = self
                        .constant(count)?
                        .parse()
                        .map_err(|_| line.to_string())?;
                    let variable = variable.chars().next().unwrap_or('_');
                    for i in 0..number {
                        self.numbers.push((variable, i));
                        self.lines(&lines[at..at + end], out)?;
                        self.numbers.pop();
                    }
                    at += end + 1;
                }
                ["//!", ..] => return Err(format!("`{line}` is no directive")),
                _ => {
                    self.replaced(line, out)?;
                    out.push('\n');
                }
            }
        }
        Ok(())
    }

    fn constant(&self, name: &str) -> Result<String, String> {
        self.instance
            .constant(name)
            .ok_or_else(|| format!("no constant {name}"))
    }

    /// Writes a line with the values of what `$` marks.
    fn replaced(&self, line: &str, out: &mut String) -> Result<(), String> {
        let mut parts = line.split('$');
        out.push_str(parts.next().unwrap_or(""));
        for part in parts {
            let name_ends = part
                .find(|c: char| !c.is_ascii_uppercase() && c != '_')
                .unwrap_or(part.len());
            let rest = if name_ends > 0 {
                out.push_str(&self.constant(&part[..name_ends])?);
                &part[name_ends..]
            } else {
                let variable = part.chars().next().unwrap_or(' ');
                let number = self.numbers.iter().rev().find(|(v, _)| *v == variable);
                let (_, number) = number.ok_or_else(|| format!("`{line}`: ${variable}"))?;
                out.push_str(&number.to_string());
                &part[1..]
            };
            out.push_str(rest);
        }
        Ok(())
    }
}

/// A text whose functions, and what else belongs to a matrix, have names that end with the matrix's
/// number.
fn renamed(text: &str, matrix: u32) -> String {
    let functions: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("fn ")?.split('(').next())
        .collect();
    let of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut out = String::with_capacity(text.len() * 5 / 4);
    let (mut rest, mut before) = (text, ' ');
    while !rest.is_empty() {
        let end = rest.find(|c| !of_name(c)).unwrap_or(rest.len());
        let (name, next) = rest.split_at(end);
        out.push_str(name);
        // Behind a dot are fields of the arguments, and components of vectors.
        let vector = before == '.' && name.len() == 1;
        if !vector && (functions.contains(&name) || OF_MATRIX.contains(&name)) {
            let _ = write!(out, "_{matrix}");
        }
        let mut others = next.chars();
        before = others.next().unwrap_or(' ');
        if !next.is_empty() {
            out.push(before);
        }
        rest = others.as_str();
    }
    out
}

/// Indices of the `else` (or else the `end`) and of the `end` of a block that begins before the
/// lines.
fn block(lines: &[&str], begin: &str) -> Result<(usize, usize), String> {
    let (mut depth, mut otherwise) = (0, None);
    for (i, line) in lines.iter().enumerate() {
        if line.starts_with("//! if ") || line.starts_with("//! for ") {
            depth += 1;
        } else if *line == "//! else" && depth == 0 {
            otherwise = Some(i);
        } else if *line == "//! end" {
            if depth == 0 {
                return Ok((otherwise.unwrap_or(i), i));
            }
            depth -= 1;
        }
    }
    Err(format!("`{begin}` has no end"))
}
