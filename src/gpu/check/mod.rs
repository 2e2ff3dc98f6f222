//! Checks every kernel against the scalar level, with odd sizes: on the emulated GPU of
//! `tests/metal`, and on a real one in `ruvllm doctor --metal`.
//!
//! Tolerances: sums of n terms may be taken in any order and with or without fused multiplication,
//! so they err by at most `n · 2⁻²⁴ · Σ|term|`. Square roots, divisions and exponentials may be
//! approximate: `FAST` is their relative error, above the 4 units in the last place that Metal
//! allows itself, or 8 with fast math.

mod attention;
mod elementwise;
mod experts;
mod products;
mod recurrent;
mod sample;

use crate::gpu::kernels::{Access, Args, Dispatch, Kernel};
use crate::quant::DType;

/// Relative error of a few operations, including approximate functions: 16 units in the last place.
const FAST: f32 = 16.0 / (1 << 24) as f32;
/// Unit roundoff of `f32`.
const EPS: f32 = 1.0 / (1 << 24) as f32;

/// A test of one or several kernels.
#[derive(Debug)]
pub struct Case {
    /// Name, after the kernels it tests.
    pub name: &'static str,
    /// The file of its kernels.
    pub source: &'static str,
    /// Runs the test; the error says which check failed, then the details.
    pub run: fn(&mut Checker<'_>) -> Result<(), String>,
}

/// All cases.
pub const CASES: &[Case] = &[
    Case {
        name: "matvec",
        source: "matvec.metal",
        run: products::matvec,
    },
    Case {
        name: "matvec_experts",
        source: "matvec.metal",
        run: products::matvec_experts,
    },
    Case {
        name: "matmul",
        source: "matmul.metal",
        run: products::matmul,
    },
    Case {
        name: "matmul_experts",
        source: "matmul.metal",
        run: products::matmul_experts,
    },
    Case {
        name: "embed",
        source: "embed.metal",
        run: products::embed,
    },
    Case {
        name: "lora",
        source: "lora.metal",
        run: products::lora,
    },
    Case {
        name: "lora_experts",
        source: "lora.metal",
        run: products::lora_experts,
    },
    Case {
        name: "attention_decode",
        source: "attention_decode.metal",
        run: attention::decode,
    },
    Case {
        name: "attention_prompt",
        source: "attention_prompt.metal",
        run: attention::prompt,
    },
    Case {
        name: "append",
        source: "pages.metal",
        run: attention::append,
    },
    Case {
        name: "hadamard",
        source: "pages.metal",
        run: attention::hadamard,
    },
    Case {
        name: "norm",
        source: "norm.metal",
        run: elementwise::norm,
    },
    Case {
        name: "rope",
        source: "rope.metal",
        run: elementwise::rope,
    },
    Case {
        name: "elementwise",
        source: "elementwise.metal",
        run: elementwise::elementwise,
    },
    Case {
        name: "route",
        source: "experts.metal",
        run: experts::route,
    },
    Case {
        name: "expert_rows",
        source: "experts.metal",
        run: experts::expert_rows,
    },
    Case {
        name: "add_expert_bias",
        source: "experts.metal",
        run: experts::add_expert_bias,
    },
    Case {
        name: "combine_experts",
        source: "experts.metal",
        run: experts::combine_experts,
    },
    Case {
        name: "causal_conv",
        source: "recurrent.metal",
        run: recurrent::causal_conv,
    },
    Case {
        name: "delta_feed",
        source: "recurrent.metal",
        run: recurrent::delta_feed,
    },
    Case {
        name: "delta_rule",
        source: "recurrent.metal",
        run: recurrent::delta_rule,
    },
    Case {
        name: "ssm_scan",
        source: "recurrent.metal",
        run: recurrent::ssm_scan,
    },
    Case {
        name: "channel_scan",
        source: "recurrent.metal",
        run: recurrent::channel_scan,
    },
    Case {
        name: "gated_groups",
        source: "recurrent.metal",
        run: recurrent::gated_groups,
    },
    Case {
        name: "gated_norm_heads",
        source: "recurrent.metal",
        run: recurrent::gated_norm_heads,
    },
    Case {
        name: "argmax",
        source: "sample.metal",
        run: sample::argmax,
    },
    Case {
        name: "softmax",
        source: "sample.metal",
        run: sample::softmax,
    },
    Case {
        name: "top_k",
        source: "sample.metal",
        run: sample::top_k,
    },
];

/// A GPU on which single kernels run.
pub trait Stage {
    /// Makes a buffer with the contents `data`; its address is a multiple of `align`.
    fn filled(&mut self, data: &[u8], align: u64) -> Handle {
        let buffer = self.empty(data.len() as u64, align);
        self.fill(buffer, 0, data);
        buffer
    }

    /// Makes an uninitialised buffer.
    fn empty(&mut self, bytes: u64, align: u64) -> Handle;

    /// Writes a part of a buffer.
    fn fill(&mut self, buffer: Handle, offset: u64, data: &[u8]);

    /// Writes the address of `target` at `offset` of `into`.
    fn point(&mut self, into: Handle, offset: u64, target: Handle);

    /// Contents of a buffer; an error if some of it was never written, where that can be detected.
    ///
    /// # Errors
    /// A description of the failure.
    fn read(&mut self, buffer: Handle) -> Result<Vec<u8>, String>;

    /// Runs a kernel and waits for it; `pages` are buffers that it accesses through addresses.
    ///
    /// # Errors
    /// A description of the failure.
    fn run(
        &mut self,
        dispatch: &Dispatch,
        buffers: &[Handle],
        pages: &[Handle],
    ) -> Result<(), String>;

    /// Whether products of many rows round weights, unless these are in `f32`, and activations to
    /// `f16`.
    fn multiplies_halves(&self) -> bool {
        false
    }

    /// Changes the order of threads from now on, unless `seed` is 0, where that is possible.
    fn shuffle(&mut self, _seed: u32) {}
}

/// Number of a buffer of a [`Stage`].
#[derive(Clone, Copy, Debug)]
pub struct Handle(pub u32);

/// Linear congruential generator with Knuth's MMIX constants.
#[derive(Clone, Debug)]
pub struct Lcg(pub u64);

impl Lcg {
    fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    fn below(&mut self, n: u32) -> u32 {
        self.next() % n
    }

    /// Uniform in −1..1.
    fn signed(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 31) as f32 - 1.0
    }

    /// Values in −1..1.
    pub fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.signed()).collect()
    }
}

/// Contents of a buffer for a call.
#[derive(Debug)]
pub enum Data<'a> {
    /// Numbers.
    F32(&'a [f32]),
    /// Integers, or structures of them.
    U32(&'a [u32]),
    /// Blocks of weights.
    Bytes(&'a [u8]),
    /// Output, written only by the kernel.
    Out,
    /// A buffer made before; it is not read back.
    Made(Handle),
}

/// Contents of the buffers that a kernel wrote, in order.
#[derive(Debug)]
pub struct Output(Vec<Vec<u8>>);

impl Output {
    /// The values of buffer `i`.
    pub fn f32(&self, i: usize) -> &[f32] {
        bytemuck::cast_slice(&self.0[i])
    }

    /// The integers of buffer `i`.
    pub fn u32(&self, i: usize) -> &[u32] {
        bytemuck::cast_slice(&self.0[i])
    }
}

/// Runs test cases.
pub struct Checker<'a> {
    stage: &'a mut dyn Stage,
    formats: &'a [DType],
    twice: bool,
}

impl<'a> Checker<'a> {
    /// A checker on `stage`, with weights in these formats. If `twice`, each call is repeated with
    /// another order of threads, which must not change any bit.
    pub fn new(stage: &'a mut dyn Stage, formats: &'a [DType], twice: bool) -> Checker<'a> {
        Checker {
            stage,
            formats,
            twice,
        }
    }

    /// Runs a kernel; `pages` are buffers that it accesses through addresses.
    ///
    /// # Errors
    /// A description of the failure.
    /// # Panics
    /// If `data` does not have the lengths given in the table of kernels.
    pub fn call<A: Args>(
        &mut self,
        kernel: &Kernel<A>,
        format: DType,
        variant: u32,
        args: &A,
        data: &[Data<'_>],
        pages: &[Handle],
    ) -> Result<Output, String> {
        let first = self.call_once(kernel, format, variant, args, data, pages)?;
        if self.twice {
            self.stage.shuffle(12345);
            let second = self.call_once(kernel, format, variant, args, data, pages);
            self.stage.shuffle(0);
            if second?.0 != first.0 {
                return Err(format!(
                    "result: {} depends on the order of threads",
                    kernel.full_name(format, variant)
                ));
            }
        }
        Ok(first)
    }

    fn call_once<A: Args>(
        &mut self,
        kernel: &Kernel<A>,
        format: DType,
        variant: u32,
        args: &A,
        data: &[Data<'_>],
        pages: &[Handle],
    ) -> Result<Output, String> {
        let dispatch = kernel.dispatch(format, variant, args);
        assert_eq!(
            data.len(),
            kernel.buffers.len(),
            "{}: buffers",
            dispatch.kernel()
        );
        let mut ids = Vec::new();
        for ((data, buffer), &len) in data.iter().zip(kernel.buffers).zip(&dispatch.lens) {
            let filled: &[u8] = match data {
                Data::F32(x) => bytemuck::cast_slice(x),
                Data::U32(x) => bytemuck::cast_slice(x),
                Data::Bytes(x) => x,
                Data::Out => {
                    assert_eq!(
                        buffer.access,
                        Access::Write,
                        "{}: {}",
                        dispatch.kernel(),
                        buffer.name
                    );
                    ids.push(self.stage.empty(len, buffer.element.align()));
                    continue;
                }
                Data::Made(id) => {
                    ids.push(*id);
                    continue;
                }
            };
            assert_eq!(
                filled.len() as u64,
                len,
                "{}: bytes of {}",
                dispatch.kernel(),
                buffer.name
            );
            ids.push(self.stage.filled(filled, buffer.element.align()));
        }
        self.stage.run(&dispatch, &ids, pages)?;
        let mut output = Vec::new();
        for ((id, buffer), data) in ids.iter().zip(kernel.buffers).zip(data) {
            if buffer.access != Access::Read && !matches!(data, Data::Made(_)) {
                output.push(self.stage.read(*id)?);
            }
        }
        Ok(Output(output))
    }
}

/// Compares values with the expected ones; `tolerance` is absolute, per value.
fn close(
    what: &str,
    y: &[f32],
    expected: &[f32],
    tolerance: impl Fn(usize) -> f32,
) -> Result<(), String> {
    assert_eq!(y.len(), expected.len(), "{what}");
    for (i, (&y, &e)) in y.iter().zip(expected).enumerate() {
        let error = (y - e).abs();
        if error.is_nan() || error > tolerance(i) {
            return Err(format!(
                "result: {what}: value {i} is {y} instead of {e}, allowed are {}",
                tolerance(i)
            ));
        }
    }
    Ok(())
}

/// Compares for equality.
fn same<T: PartialEq + std::fmt::Debug>(what: &str, y: &[T], expected: &[T]) -> Result<(), String> {
    assert_eq!(y.len(), expected.len(), "{what}");
    match (0..y.len()).find(|&i| y[i] != expected[i]) {
        Some(i) => Err(format!(
            "result: {what}: value {i} is {:?} instead of {:?}",
            y[i], expected[i]
        )),
        None => Ok(()),
    }
}
