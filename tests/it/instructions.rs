//! Work whose executed instructions `tests/neon_instructions.py` counts.

use half::f16;
use ruvllm::KvType;
use ruvllm::arch::{
    ActForm, Acts, AttnParams, AttnPartial, BlockP16, BlockQ16, ColumnsMut, KV_BLOCK, KvBlock,
    KvSpan, KvStored,
};
use ruvllm::quant::FORMATS;

/// `RUVLLM_PRODUCT` says how: `few` or `panels`, a format, rows of weights, values of each,
/// activation rows, and how often.
#[test]
#[ignore = "for tests/neon_instructions.py"]
fn product() {
    let args = std::env::var("RUVLLM_PRODUCT").expect("RUVLLM_PRODUCT says what to multiply");
    let [kernel, format, sizes @ ..] = &args.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{args}")
    };
    let f = FORMATS
        .iter()
        .find(|f| f.name == *format)
        .expect("a format");
    let [n, k, m, rounds] = [0, 1, 2, 3].map(|i| sizes[i].parse::<usize>().expect("a number"));
    let (arch, dtype) = (crate::run::level(), f.dtype);
    let (w, x) = (
        vec![0; n * k / f.block_elems * f.block_bytes],
        vec![1.0f32; m * k],
    );
    let mut y = vec![0.0; m * n];
    let mut y = ColumnsMut::new(&mut y, m, n);
    if *kernel == "panels" {
        let mut packed = vec![0u32; arch.packed_len(dtype, m, k) / 4];
        let group = arch.pack_group(dtype);
        let groups = bytemuck::cast_slice_mut::<_, u8>(&mut packed)
            .chunks_mut(arch.packed_len(dtype, group, k));
        for (x, packed) in x.chunks(group * k).zip(groups) {
            arch.pack(dtype, x, m, k, packed);
        }
        let mut workspace = vec![bytemuck::Zeroable::zeroed(); arch.gemm_workspace(dtype)];
        for _ in 0..rounds {
            arch.gemm(
                dtype,
                &mut y,
                &w,
                bytemuck::cast_slice(&packed),
                k,
                &mut workspace,
            );
        }
        return;
    }
    let mut q16: Vec<BlockQ16> = vec![bytemuck::Zeroable::zeroed(); m * BlockQ16::per_row(k)];
    let mut p16: Vec<BlockP16> = vec![bytemuck::Zeroable::zeroed(); m * BlockP16::per_row(k)];
    for (i, x) in x.chunks(k).enumerate() {
        arch.quantize_p16(
            x,
            &mut p16[i * BlockP16::per_row(k)..][..BlockP16::per_row(k)],
        );
        arch.quantize_q16(
            x,
            &mut q16[i * BlockQ16::per_row(k)..][..BlockQ16::per_row(k)],
        );
    }
    let acts = match arch.act_form(dtype) {
        ActForm::F32 => Acts::F32 { x: &x, n: k },
        ActForm::Q16 => Acts::Q16 { x: &q16, n: k },
        ActForm::P16 => Acts::P16 { x: &p16, n: k },
    };
    for _ in 0..rounds {
        arch.matvec(dtype, &mut y, &w, &acts);
    }
}

/// `RUVLLM_PRODUCT` says how: a step of a recurrent layer, rows and columns of its state, and how
/// often.
#[test]
#[ignore = "for tests/neon_instructions.py"]
fn step() {
    let args = std::env::var("RUVLLM_PRODUCT").expect("RUVLLM_PRODUCT says which step");
    let [kernel, sizes @ ..] = &args.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{args}")
    };
    let [n, d, rounds] = [0, 1, 2].map(|i| sizes[i].parse::<usize>().expect("a number"));
    let (arch, all) = (crate::run::level(), vec![0.1f32; n * d]);
    let (mut state, mut out) = (vec![0.0; n * d], vec![0.0; d]);
    let (k, v) = (&all[..n], &all[..d]);
    for _ in 0..rounds {
        match *kernel {
            "delta_rule" => arch.delta_rule(&mut state, k, k, v, 0.5, &[0.5], &mut out),
            "delta_rule_by_row" => arch.delta_rule(&mut state, k, k, v, 0.5, k, &mut out),
            "ssm_step" => arch.ssm_step(&mut state, k, k, 0.5, 0.5, v, &mut out),
            "ssm_step_by_state" => arch.ssm_step_by_state(&mut state, &all, k, k, v, v, &mut out),
            "rwkv6_step" => arch.rwkv6_step(&mut state, k, k, v, k, k, &mut out),
            "rwkv7_step" => arch.rwkv7_step(&mut state, [k; 5], v, &mut out),
            // The last row of taps is that of the token itself.
            "causal_conv" => arch.causal_conv(&mut state[d..], (&all, d), v, &mut out),
            _ => panic!("{kernel}"),
        }
    }
}

/// `RUVLLM_PRODUCT` says how: the bits of keys and values, query rows, blocks of keys, width of a
/// head, and how often.
#[test]
#[ignore = "for tests/neon_instructions.py"]
fn attention() {
    let args = std::env::var("RUVLLM_PRODUCT").expect("RUVLLM_PRODUCT says how wide");
    let args: Vec<usize> = args
        .split(' ')
        .map(|arg| arg.parse().expect("a number"))
        .collect();
    let [bits, n_q, n_blocks, dim, rounds] = args[..] else {
        panic!("{args:?}")
    };
    let arch = crate::run::level();
    let p = AttnParams {
        head_dim: dim,
        head_dim_v: dim,
        scale: 0.1,
        softcap: 0.0,
        slope: 0.0,
        exact: true,
    };
    let (q, ranges) = (
        vec![1.0f32; n_q * dim],
        vec![(0, (n_blocks * KV_BLOCK) as u32); n_q],
    );
    let mut buffer = vec![0.0; AttnPartial::len(n_q, dim)];
    let mut total = AttnPartial::of(&mut buffer, n_q);
    total.clear();
    let zeros = vec![0u64; KvType::F32.block_bytes(dim) / 8];
    let zeros: &[u8] = bytemuck::cast_slice(&zeros);
    let kinds = [KvType::Q8, KvType::Q6, KvType::Q5, KvType::Q4];
    if let Some(kind) = kinds.into_iter().find(|kind| kind.bits() == bits) {
        let block = &zeros[..kind.block_bytes(dim)];
        let blocks = vec![KvBlock { k: block, v: block }; n_blocks];
        let stored = KvStored {
            k: kind,
            v: kind,
            span: KvSpan {
                first: 0,
                blocks: &blocks,
            },
        };
        for _ in 0..rounds {
            arch.attention_stored(&mut total, &q, stored, &ranges, &p);
        }
    } else if bits == 16 {
        let block: &[f16] = &bytemuck::cast_slice(zeros)[..KV_BLOCK * dim];
        let blocks = vec![KvBlock { k: block, v: block }; n_blocks];
        for _ in 0..rounds {
            arch.attention(
                &mut total,
                &q,
                KvSpan {
                    first: 0,
                    blocks: &blocks,
                },
                &ranges,
                &p,
            );
        }
    } else {
        let block: &[f32] = bytemuck::cast_slice(zeros);
        let blocks = vec![KvBlock { k: block, v: block }; n_blocks];
        for _ in 0..rounds {
            arch.attention(
                &mut total,
                &q,
                KvSpan {
                    first: 0,
                    blocks: &blocks,
                },
                &ranges,
                &p,
            );
        }
    }
}
