//! Quantisers and format edge cases; needs no files.

use ruvllm::quant::{FORMATS, Format};

/// Knuth's MMIX generator; `next` is uniform in 0..1 with 24 bits.
struct Lcg(u64);

impl Lcg {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f64 / (1u64 << 24) as f64
    }

    /// Nearly Gaussian, variance 1: the sum of twelve uniform numbers, which every machine adds up
    /// to the same bits.
    fn gaussian(&mut self) -> f64 {
        (0..12).map(|_| self.next()).sum::<f64>() - 6.0
    }

    /// Laplace, variance 2: the determinant of a Gaussian 2×2 matrix has that distribution.
    fn laplace(&mut self) -> f64 {
        let [a, b, c, d] = std::array::from_fn(|_| self.gaussian());
        a * b + c * d
    }
}

fn gaussian() -> Vec<f32> {
    let mut lcg = Lcg(1);
    (0..1 << 16).map(|_| lcg.gaussian() as f32).collect()
}

fn laplace() -> Vec<f32> {
    let mut lcg = Lcg(2);
    (0..1 << 16).map(|_| lcg.laplace() as f32).collect()
}

fn quantize(format: &Format, x: &[f32], importance: Option<&[f32]>) -> Vec<u8> {
    let mut blocks = vec![0; x.len() / format.block_elems * format.block_bytes];
    format.quantize.unwrap()(x, importance, &mut blocks);
    blocks
}

fn dequantize(format: &Format, blocks: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; blocks.len() / format.block_bytes * format.block_elems];
    (format.dequantize)(blocks, &mut out);
    out
}

fn writable() -> impl Iterator<Item = &'static Format> {
    FORMATS.iter().filter(|f| f.quantize.is_some())
}

/// Root-mean-square error.
fn rms(x: &[f32], y: &[f32]) -> f64 {
    let sum: f64 = x.iter().zip(y).map(|(x, y)| (*x as f64 - *y as f64).powi(2)).sum();
    (sum / x.len() as f64).sqrt()
}

#[test]
fn measure() {
    for (name, x) in [("gaussian", gaussian()), ("laplace", laplace())] {
        println!("{name} {:?}", &x[..4]);
        for f in writable() {
            let mut b = vec![];
            let t = (0..5)
                .map(|_| {
                    let t = std::time::Instant::now();
                    b = quantize(f, &x, None);
                    t.elapsed()
                })
                .min()
                .unwrap();
            println!(
                "{name} {} {:.8} {:.2} ns/value",
                f.name,
                rms(&x, &dequantize(f, &b)),
                t.as_nanos() as f64 / x.len() as f64
            );
        }
    }
}
