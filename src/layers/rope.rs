//! Rotary positions (RoPE): angles by position, and rotations of heads.

pub(crate) mod spec;
pub(crate) mod weights;

use crate::arch::{Arch, MAX_HEAD_DIM};
use crate::layers::hparams::Hparams;
use crate::layers::rope::spec::{Rope, RopeId, RopeOrder, RopeSections};
use crate::layers::rope::weights::RopeFactors;
use std::ops::Range;

/// The ropes of a model with the frequencies for a session, which depend on its context length.
#[derive(Clone, Debug)]
pub(crate) struct RopeTables {
    ropes: Vec<RopeTable>,
}

#[derive(Clone, Debug)]
struct RopeTable {
    order: RopeOrder,
    /// Frequency of each pair of dimensions.
    frequencies: Vec<f32>,
    /// Factor on cosines and sines.
    factor: f32,
    /// Number of pairs of the ropes before it.
    first: usize,
    sections: Option<RopeSections>,
}

impl RopeTables {
    pub(crate) fn new(all: &[Rope], factors: &RopeFactors, n_ctx: usize) -> RopeTables {
        let mut ropes = Vec::<RopeTable>::new();
        for rope in all {
            let factors = match &factors.short_long {
                Some((_, long)) if n_ctx > rope.n_ctx_orig => Some(long),
                Some((short, _)) => Some(short),
                None => factors.all.as_ref(),
            };
            let (frequencies, factor) =
                rope.frequencies(factors.filter(|_| rope.factors).map(Vec::as_slice), n_ctx);
            let first = ropes
                .last()
                .map_or(0, |last| last.first + last.frequencies.len());
            ropes.push(RopeTable {
                order: rope.order,
                frequencies,
                factor,
                first,
                sections: rope.sections,
            });
        }
        RopeTables { ropes }
    }

    /// Identifies tables: a hash (FNV-1a) of everything on which angles depend.
    pub(crate) fn fingerprint(&self) -> u64 {
        let of_table = |table: &RopeTable| {
            let values = table
                .frequencies
                .iter()
                .chain([&table.factor])
                .map(|x| x.to_bits());
            values
                .chain([table.order as u32, table.first as u32])
                .collect::<Vec<u32>>()
        };
        let values = self.ropes.iter().flat_map(of_table);
        values.fold(0xcbf2_9ce4_8422_2325, |hash, x| {
            (hash ^ u64::from(x)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    /// Number of cosines, or sines, for `m` tokens.
    pub(crate) fn n_angles(h: &Hparams, m: usize) -> usize {
        h.ropes.iter().map(|rope| m * rope.n_dims / 2).sum()
    }

    /// Cosines and sines of the positions from `pos` on, for the rows `rows` of `m`: `(m,
    /// n_dims/2)` for each rope, one after the other.
    pub(crate) fn angles(
        &self,
        arch: Arch,
        pos: usize,
        (rows, m): (Range<usize>, usize),
        cos: &mut [f32],
        sin: &mut [f32],
    ) {
        for RopeTable {
            frequencies,
            factor,
            first,
            ..
        } in &self.ropes
        {
            let n = frequencies.len();
            let begin = m * first + rows.start * n;
            let [cos, sin] =
                [&mut *cos, &mut *sin].map(|x| x[begin..][..rows.len() * n].chunks_exact_mut(n));
            for (i, (cos, sin)) in cos.zip(sin).enumerate() {
                arch.rope_angles(cos, sin, frequencies, (pos + i) as f32, *factor);
            }
        }
    }

    /// Rotates the first dimensions of a head by a rope, as one at position `pos`.
    pub(crate) fn rotate_at(&self, arch: Arch, id: RopeId, pos: usize, head: &mut [f32]) {
        let RopeTable {
            order,
            ref frequencies,
            factor,
            ..
        } = self.ropes[id.index()];
        let n_pairs = frequencies.len();
        let [mut cos, mut sin] = [[0.0; MAX_HEAD_DIM / 2]; 2];
        let (cos, sin) = (&mut cos[..n_pairs], &mut sin[..n_pairs]);
        arch.rope_angles(cos, sin, frequencies, pos as f32, factor);
        let rotation = Rotation {
            arch,
            order,
            n_pairs,
            cos,
            sin,
        };
        rotation.apply(0, head);
    }

    /// Dimensions that a rope turns together, and by how much from one position to the next.
    pub(crate) fn turned(&self, id: RopeId) -> Vec<(usize, usize, f32)> {
        let table = &self.ropes[id.index()];
        let n_pairs = table.frequencies.len();
        let pair = |(i, &frequency)| match table.order {
            RopeOrder::Norm => (2 * i, 2 * i + 1, frequency),
            RopeOrder::NeoX => (i, i + n_pairs, frequency),
        };
        table.frequencies.iter().enumerate().map(pair).collect()
    }

    /// [`RopeTables::angles`] of positions by axis, for rows of a text with images.
    pub(crate) fn angles_by_axis(
        &self,
        arch: Arch,
        turns: impl Fn(usize) -> [usize; 3],
        (rows, m): (Range<usize>, usize),
        cos: &mut [f32],
        sin: &mut [f32],
    ) {
        for RopeTable {
            frequencies,
            factor,
            first,
            sections,
            ..
        } in &self.ropes
        {
            let n = frequencies.len();
            let begin = m * first + rows.start * n;
            let [cos, sin] =
                [&mut *cos, &mut *sin].map(|x| x[begin..][..rows.len() * n].chunks_exact_mut(n));
            for (i, (cos, sin)) in cos.zip(sin).enumerate() {
                let turns = turns(i);
                arch.rope_angles(cos, sin, frequencies, turns[0] as f32, *factor);
                let Some(sections) = sections.filter(|_| turns != [turns[0]; 3]) else {
                    continue;
                };
                let mut rest = 0;
                while rest < n {
                    let axis = sections.axis(rest);
                    let run = (rest..n)
                        .take_while(|&pair| sections.axis(pair) == axis)
                        .count();
                    let pairs = rest..rest + run;
                    rest += run;
                    let turn = turns[axis] as f32;
                    arch.rope_angles(
                        &mut cos[pairs.clone()],
                        &mut sin[pairs.clone()],
                        &frequencies[pairs],
                        turn,
                        *factor,
                    );
                }
            }
        }
    }

    /// Pairs of dimensions that all ropes together turn.
    pub(crate) fn n_pairs(&self) -> usize {
        self.ropes.iter().map(|rope| rope.frequencies.len()).sum()
    }

    /// [`RopeTables::angles`] of one position, without the factors on keys and queries.
    pub(crate) fn unscaled_angles(&self, arch: Arch, pos: usize, cos: &mut [f32], sin: &mut [f32]) {
        for RopeTable {
            frequencies, first, ..
        } in &self.ropes
        {
            let pairs = *first..first + frequencies.len();
            arch.rope_angles(
                &mut cos[pairs.clone()],
                &mut sin[pairs],
                frequencies,
                pos as f32,
                1.0,
            );
        }
    }

    /// A rope by the angles of `m` tokens.
    pub(crate) fn rotation<'a>(
        &self,
        arch: Arch,
        id: RopeId,
        m: usize,
        cos: &'a [f32],
        sin: &'a [f32],
    ) -> Rotation<'a> {
        let RopeTable {
            order,
            ref frequencies,
            first,
            ..
        } = self.ropes[id.index()];
        let n_pairs = frequencies.len();
        let [cos, sin] = [cos, sin].map(|x| &x[m * first..][..m * n_pairs]);
        Rotation {
            arch,
            order,
            n_pairs,
            cos,
            sin,
        }
    }
}

/// A rope at the positions of some tokens.
#[derive(Clone, Copy)]
pub(crate) struct Rotation<'a> {
    arch: Arch,
    order: RopeOrder,
    n_pairs: usize,
    /// `(m, n_pairs)`.
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Rotation<'_> {
    /// Rotates a head of `token` the other way.
    pub(crate) fn undo(&self, token: usize, head: &mut [f32]) {
        let mut back = [0.0; MAX_HEAD_DIM / 2];
        let back = &mut back[..self.n_pairs];
        let sin = &self.sin[token * self.n_pairs..];
        back.iter_mut().zip(sin).for_each(|(to, sin)| *to = -sin);
        let rotation = Rotation {
            cos: &self.cos[token * self.n_pairs..],
            sin: back,
            ..*self
        };
        rotation.apply(0, head);
    }

    /// Rotates a head of `token`.
    pub(crate) fn apply(&self, token: usize, head: &mut [f32]) {
        let [cos, sin] = [self.cos, self.sin].map(|x| &x[token * self.n_pairs..][..self.n_pairs]);
        let x = &mut head[..2 * self.n_pairs];
        match self.order {
            RopeOrder::Norm => self.arch.rope_norm(x, cos, sin),
            RopeOrder::NeoX => self.arch.rope_neox(x, cos, sin),
        }
    }
}
