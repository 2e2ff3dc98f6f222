//! Quantisers of the IQ formats with a grid.

use super::block::Pack;
use super::grid_fit::{Grid, GridBlock, GridFit, GridFormat, Offset, Signs};
use super::iq::{BlockIq1M, BlockIq1S, BlockIq2S, BlockIq2Xs, BlockIq2Xxs, BlockIq3S, BlockIq3Xxs};
use super::iq_grids::{
    IQ1_GRID, IQ2_S_GRID, IQ2_VALUES, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_S_VALUES,
    IQ3_XXS_GRID, IQ3_XXS_VALUES,
};
use std::sync::LazyLock;

static IQ2_XXS: LazyLock<GridFormat<8>> = LazyLock::new(|| GridFormat {
    grid: Grid::new(&IQ2_XXS_GRID, &IQ2_VALUES),
    unit: 0.125,
    max_n: 15,
    sub_block: 32,
    signs: Signs::Even,
    offset: Offset::None,
});

static IQ2_XS: LazyLock<GridFormat<8>> = LazyLock::new(|| GridFormat {
    grid: Grid::new(&IQ2_XS_GRID, &IQ2_VALUES),
    unit: 0.125,
    max_n: 15,
    sub_block: 16,
    signs: Signs::Even,
    offset: Offset::None,
});

static IQ2_S: LazyLock<GridFormat<8>> = LazyLock::new(|| GridFormat {
    grid: Grid::new(&IQ2_S_GRID, &IQ2_VALUES),
    unit: 0.125,
    max_n: 15,
    sub_block: 16,
    signs: Signs::Free,
    offset: Offset::None,
});

static IQ3_XXS: LazyLock<GridFormat<4>> = LazyLock::new(|| GridFormat {
    grid: Grid::new(&IQ3_XXS_GRID, &IQ3_XXS_VALUES),
    unit: 0.25,
    max_n: 15,
    sub_block: 32,
    signs: Signs::Even,
    offset: Offset::None,
});

static IQ3_S: LazyLock<GridFormat<4>> = LazyLock::new(|| GridFormat {
    grid: Grid::new(&IQ3_S_GRID, &IQ3_S_VALUES),
    unit: 1.0,
    max_n: 15,
    sub_block: 32,
    signs: Signs::Free,
    offset: Offset::None,
});

static IQ1_S: LazyLock<GridFormat<8>> = LazyLock::new(|| GridFormat {
    grid: Grid::new(&IQ1_GRID, &[-1, 0, 1]),
    unit: 1.0,
    max_n: 7,
    sub_block: 32,
    signs: Signs::None,
    offset: Offset::OfSubBlock,
});

static IQ1_M: LazyLock<GridFormat<8>> = LazyLock::new(|| GridFormat {
    grid: Grid::new(&IQ1_GRID, &[-1, 0, 1]),
    unit: 1.0,
    max_n: 7,
    sub_block: 16,
    signs: Signs::None,
    offset: Offset::OfEight,
});

/// Seven signs of four groups, and a scale above them.
fn signs_and_scale(signs: &[u8], n: u8) -> u32 {
    let signs = signs.iter().zip(0..).fold(0, |bits, (&signs, i)| {
        bits | u32::from(signs & 127) << (7 * i)
    });
    signs | u32::from(n) << 28
}

/// The low eight bits.
fn low(point: u16) -> u8 {
    (point & 255) as u8
}

/// Nibbles in pairs, the low one first.
fn nibbles<const N: usize>(n: &[u8; 16]) -> [u8; N] {
    std::array::from_fn(|i| n[2 * i] | n[2 * i + 1] << 4)
}

impl Pack for BlockIq2Xxs {
    type Fit = GridFit<8>;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Self::Fit {
        IQ2_XXS.fit(x, weights)
    }

    fn store(fit: &Self::Fit) -> Self {
        let b = &fit.block;
        BlockIq2Xxs {
            d: b.d,
            qs: std::array::from_fn(|s| {
                let [p0, p1, p2, p3] = std::array::from_fn(|i| low(b.points[4 * s + i]));
                let bits = signs_and_scale(&b.signs[4 * s..4 * s + 4], b.n[s]);
                let [s0, s1, s2, s3] = bits.to_le_bytes();
                [p0, p1, p2, p3, s0, s1, s2, s3]
            }),
        }
    }
}

impl Pack for BlockIq2Xs {
    type Fit = GridFit<8>;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Self::Fit {
        IQ2_XS.fit(x, weights)
    }

    fn store(fit: &Self::Fit) -> Self {
        let b = &fit.block;
        let group = |g| b.points[g] | u16::from(b.signs[g] & 127) << 9;
        BlockIq2Xs {
            d: b.d,
            qs: std::array::from_fn(|g| group(g).to_le_bytes()),
            scales: nibbles(&b.n),
        }
    }
}

impl Pack for BlockIq2S {
    type Fit = GridFit<8>;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Self::Fit {
        IQ2_S.fit(x, weights)
    }

    fn store(fit: &Self::Fit) -> Self {
        let b = &fit.block;
        BlockIq2S {
            d: b.d,
            qs: std::array::from_fn(|g| low(b.points[g])),
            signs: b.signs,
            qh: high_bits(b, 4, 2),
            scales: nibbles(&b.n),
        }
    }
}

impl Pack for BlockIq3Xxs {
    type Fit = GridFit<4>;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Self::Fit {
        IQ3_XXS.fit(x, weights)
    }

    fn store(fit: &Self::Fit) -> Self {
        let b = &fit.block;
        let sub_block = |s: usize| signs_and_scale(&b.signs[4 * s..4 * s + 4], b.n[s]);
        BlockIq3Xxs {
            d: b.d,
            qs: b.points.map(low),
            scales_and_signs: std::array::from_fn(|s| sub_block(s).to_le_bytes()),
        }
    }
}

impl Pack for BlockIq3S {
    type Fit = GridFit<4>;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Self::Fit {
        IQ3_S.fit(x, weights)
    }

    fn store(fit: &Self::Fit) -> Self {
        let b = &fit.block;
        BlockIq3S {
            d: b.d,
            qs: b.points.map(low),
            qh: high_bits(b, 8, 1),
            signs: b.signs,
            scales: nibbles(&b.n),
        }
    }
}

/// The bits of grid indices above the low eight, `bits` each, of `groups` groups in a byte.
fn high_bits(b: &GridBlock, groups: usize, bits: usize) -> [u8; 8] {
    std::array::from_fn(|byte| {
        let points = &b.points[groups * byte..][..groups];
        let high = |(i, point): (usize, &u16)| ((point >> 8) as u8) << (bits * i);
        points
            .iter()
            .enumerate()
            .map(high)
            .fold(0, |all, h| all | h)
    })
}

impl Pack for BlockIq1S {
    type Fit = GridFit<8>;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Self::Fit {
        IQ1_S.fit(x, weights)
    }

    fn store(fit: &Self::Fit) -> Self {
        let b = &fit.block;
        let sub_block = |s: usize| {
            let points = b.points[4 * s..4 * s + 4].iter().zip(0..);
            let high = points.fold(0, |bits, (point, i)| bits | point >> 8 << (3 * i));
            high | u16::from(b.n[s]) << 12 | u16::from(b.lowered[4 * s]) << 15
        };
        BlockIq1S {
            d: b.d,
            qs: std::array::from_fn(|g| low(b.points[g])),
            qh: std::array::from_fn(|s| sub_block(s).to_le_bytes()),
        }
    }
}

impl Pack for BlockIq1M {
    type Fit = GridFit<8>;

    fn fit(x: &[f32; 256], weights: &[f32; 256]) -> Self::Fit {
        IQ1_M.fit(x, weights)
    }

    fn store(fit: &Self::Fit) -> Self {
        let b = &fit.block;
        let d = u16::from_le_bytes(b.d);
        let nibble = |g: usize| (b.points[g] >> 8) as u8 | u8::from(b.lowered[g]) << 3;
        let word = |j: usize| {
            let scales = b.n[4 * j..4 * j + 4].iter().zip(0..);
            let scales = scales.fold(0, |bits, (&n, i)| bits | u16::from(n) << (3 * i));
            scales | (d >> (4 * j) & 15) << 12
        };
        BlockIq1M {
            qs: std::array::from_fn(|g| low(b.points[g])),
            qh: std::array::from_fn(|i| nibble(2 * i) | nibble(2 * i + 1) << 4),
            scales: std::array::from_fn(|j| word(j).to_le_bytes()),
        }
    }
}
