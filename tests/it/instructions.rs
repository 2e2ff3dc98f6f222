//! Products whose executed instructions `tests/neon_instructions.py` counts.

use ruvllm::arch::{ActForm, Acts, BlockP16, BlockQ16, ColumnsMut};
use ruvllm::quant::FORMATS;

/// `RUVLLM_PRODUCT` says how: `few` or `panels`, a format, rows of weights, values of each, activation
/// rows, and how often.
#[test]
#[ignore = "for tests/neon_instructions.py"]
fn product() {
    let args = std::env::var("RUVLLM_PRODUCT").expect("RUVLLM_PRODUCT says what to multiply");
    let [kernel, format, sizes @ ..] = &args.split(' ').collect::<Vec<_>>()[..] else { panic!("{args}") };
    let f = FORMATS.iter().find(|f| f.name == *format).expect("a format");
    let [n, k, m, rounds] = [0, 1, 2, 3].map(|i| sizes[i].parse::<usize>().expect("a number"));
    let (arch, dtype) = (crate::run::level(), f.dtype);
    let (w, x) = (vec![0; n * k / f.block_elems * f.block_bytes], vec![1.0f32; m * k]);
    let mut y = vec![0.0; m * n];
    let mut y = ColumnsMut::new(&mut y, m, n);
    if *kernel == "panels" {
        let mut packed = vec![0u32; arch.packed_len(dtype, m, k) / 4];
        let group = arch.pack_group(dtype);
        let groups = bytemuck::cast_slice_mut::<_, u8>(&mut packed).chunks_mut(arch.packed_len(dtype, group, k));
        for (x, packed) in x.chunks(group * k).zip(groups) {
            arch.pack(dtype, x, m, k, packed);
        }
        let mut workspace = vec![bytemuck::Zeroable::zeroed(); arch.gemm_workspace(dtype)];
        for _ in 0..rounds {
            arch.gemm(dtype, &mut y, &w, bytemuck::cast_slice(&packed), k, &mut workspace);
        }
        return;
    }
    let mut q16: Vec<BlockQ16> = vec![bytemuck::Zeroable::zeroed(); m * BlockQ16::per_row(k)];
    let (narrow, wide) = (BlockP16::<4>::per_row(k), BlockP16::<8>::per_row(k));
    let mut p16 = vec![bytemuck::Zeroable::zeroed(); m * narrow];
    let mut p16_wide = vec![bytemuck::Zeroable::zeroed(); m * wide];
    for (i, x) in x.chunks(k).enumerate() {
        arch.quantize_p16(x, &mut p16[i * narrow..][..narrow]);
        arch.quantize_p16_wide(x, &mut p16_wide[i * wide..][..wide]);
        arch.quantize_q16(x, &mut q16[i * BlockQ16::per_row(k)..][..BlockQ16::per_row(k)]);
    }
    let acts = match arch.act_form(dtype) {
        ActForm::F32 => Acts::F32 { x: &x, n: k },
        ActForm::Q16 => Acts::Q16 { x: &q16, n: k },
        ActForm::P16 => Acts::P16 { x: &p16, n: k },
        ActForm::P16Wide => Acts::P16Wide { x: &p16_wide, n: k },
    };
    for _ in 0..rounds {
        arch.matvec(dtype, &mut y, &w, &acts);
    }
}
