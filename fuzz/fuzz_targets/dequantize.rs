//! Any bytes are blocks of every format: each expands to as many values as it should, whatever its
//! address, and what comes out can be packed again into finite values.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ruvllm::quant::{DType, FORMATS, dequantize_row, quantize_row};

fuzz_target!(|bytes: &[u8]| {
    for format in FORMATS {
        let n_blocks = bytes.len() / format.block_bytes;
        let blocks = &bytes[..n_blocks * format.block_bytes];
        let mut values = vec![0.0; n_blocks * format.block_elems];
        dequantize_row(format.dtype, blocks, &mut values).unwrap();

        let Some(quantize) = format.quantize else {
            continue;
        };
        let mut packed = vec![0; blocks.len()];
        let finite = values.iter().all(|x| x.is_finite());
        assert_eq!(
            quantize_row(format.dtype, &values, None, &mut packed).is_ok(),
            finite
        );
        quantize(&values, Some(&values), &mut packed);
        (format.dequantize)(&packed, &mut values);
        // F32 and BF16 have no scale: they keep what they were given.
        let unscaled = matches!(format.dtype, DType::F32 | DType::BF16);
        assert!(
            unscaled || values.iter().all(|x| x.is_finite()),
            "{}",
            format.name
        );
    }
});
