//! Spans of a text whose rows are embeddings of images instead of tokens'.
#![cfg_attr(not(feature = "vision"), allow(dead_code))] // only images make spans

use crate::arch::KV_BLOCK;
use crate::kv::ImageKey;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// What the tokens of an image see of each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sight {
    /// Earlier ones only, as text.
    Causal,
    /// All, in every layer.
    Both,
    /// All in layers with a window, earlier ones only in others.
    BothInWindows,
}

/// Adjacent positions of a text that hold embeddings of an image.
#[derive(Clone)]
pub(crate) struct Span {
    /// First position.
    pub(crate) start: usize,
    /// Number of positions.
    pub(crate) n: usize,
    /// First row of `rows` that it takes.
    pub(crate) first: usize,
    /// `(_, width·(1 + n_deep))`.
    pub(crate) rows: Arc<[f32]>,
    /// The image, for the prefix cache.
    pub(crate) key: ImageKey,
    pub(crate) width: usize,
    /// Layers to whose outputs further embeddings are added.
    pub(crate) n_deep: usize,
    /// With M-RoPE, rows and columns of the image.
    pub(crate) cells: Option<(usize, usize)>,
    pub(crate) sight: Sight,
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Span({:?}, {:?})", self.range(), self.sight)
    }
}

impl Span {
    fn range(&self) -> Range<usize> {
        self.start..self.start + self.n
    }

    /// The `layer`-th part of row `i`; the main one is 0.
    fn part(&self, i: usize, layer: usize) -> &[f32] {
        let row = (self.first + i) * (1 + self.n_deep) + layer;
        &self.rows[row * self.width..][..self.width]
    }

    /// Positions by which a text goes on behind it, with M-RoPE: the longer side.
    fn n_turns(&self) -> usize {
        self.cells
            .map_or(self.n, |(rows, columns)| rows.max(columns))
    }

    fn is_uncut(&self) -> bool {
        self.sight != Sight::Causal
    }
}

/// The spans of a text, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Spans(Vec<Span>);

impl FromIterator<Span> for Spans {
    fn from_iter<I: IntoIterator<Item = Span>>(spans: I) -> Spans {
        Spans(spans.into_iter().collect())
    }
}

impl Spans {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends a span, which lies behind the others.
    pub(crate) fn push(&mut self, span: Span) {
        self.0.push(span);
    }

    /// First position of the first span.
    pub(crate) fn start(&self) -> Option<usize> {
        self.0.first().map(|span| span.start)
    }

    /// Drops spans that do not end before `position`.
    pub(crate) fn truncate(&mut self, position: usize) {
        self.0.retain(|span| span.range().end <= position);
    }

    /// Number of images among them: each begins with its first row.
    pub(crate) fn n_images(&self) -> usize {
        self.0.iter().filter(|span| span.first == 0).count()
    }

    /// The largest position up to `end` that is in no span.
    pub(crate) fn whole_until(&self, end: usize) -> usize {
        self.at(end).map_or(end, |(span, _)| span.start)
    }

    /// Where a later text may go on, of the positions of a pass: the last border of a page, or the
    /// end of an image behind it or around it.
    pub(crate) fn checkpoint(&self, passed: Range<usize>) -> usize {
        (passed.end / KV_BLOCK * KV_BLOCK).max(self.last_end(passed))
    }

    /// The end of the last image that ends in a pass; 0 if none does.
    pub(crate) fn last_end(&self, passed: Range<usize>) -> usize {
        let ends = self.0.iter().map(|span| span.range().end);
        let ends = ends.filter(|&end| passed.start < end && end <= passed.end);
        ends.max().unwrap_or(0)
    }

    /// Whether `position` lies inside of a span, not at its start.
    pub(crate) fn splits(&self, position: usize) -> bool {
        self.at(position)
            .is_some_and(|(span, _)| span.start < position)
    }

    fn at(&self, position: usize) -> Option<(&Span, usize)> {
        let i = self.0.partition_point(|span| span.range().end <= position);
        let span = self.0.get(i).filter(|span| span.start <= position)?;
        Some((span, position - span.start))
    }

    /// Values of a row, which is the same in all of them.
    pub(crate) fn width(&self) -> Option<usize> {
        self.0.first().map(|span| span.width)
    }

    /// The spans, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Span> {
        self.0.iter()
    }

    /// The image at a position; the key is zero at that of a token.
    pub(crate) fn key(&self, position: usize) -> ImageKey {
        self.at(position)
            .map(|(span, _)| span.key)
            .unwrap_or_default()
    }

    /// The embedding at a position.
    pub(crate) fn embedding(&self, position: usize) -> Option<&[f32]> {
        self.at(position).map(|(span, i)| span.part(i, 0))
    }

    /// What is added to the output of a layer at a position.
    pub(crate) fn deep(&self, position: usize, layer: usize) -> Option<&[f32]> {
        let (span, i) = self.at(position)?;
        (layer < span.n_deep).then(|| span.part(i, layer + 1))
    }

    /// Whether positions are of time, row and column.
    pub(crate) fn has_grids(&self) -> bool {
        self.0.iter().any(|span| span.cells.is_some())
    }

    /// Time, row and column of a position (Qwen2-VL, arXiv 2409.12191). They are equal outside of
    /// images.
    pub(crate) fn turns(&self, position: usize) -> [usize; 3] {
        let before = self
            .0
            .iter()
            .take_while(|span| span.range().end <= position);
        let saved: usize = before.map(|span| span.n - span.n_turns()).sum();
        match self.at(position) {
            Some((
                Span {
                    start,
                    cells: Some((_, columns)),
                    ..
                },
                i,
            )) => {
                let t = start - saved;
                [t, t + i / columns, t + i % columns]
            }
            _ => [position - saved; 3],
        }
    }

    /// The positions that one sees, given those that it would see as text.
    pub(crate) fn seen(
        &self,
        position: usize,
        causal: Range<usize>,
        in_window: bool,
    ) -> Range<usize> {
        match self.at(position) {
            Some((span, _)) if span.sight == Sight::Both || in_window && span.is_uncut() => {
                causal.start.min(span.start)..causal.end.max(span.range().end)
            }
            _ => causal,
        }
    }

    /// The start of the uncut span inside of which `position` lies.
    pub(crate) fn uncut_start(&self, position: usize) -> Option<usize> {
        let (span, i) = self.at(position)?;
        (span.is_uncut() && i > 0).then_some(span.start)
    }

    /// How many of `n` tokens from `position` on, about `most`, a pass takes without cutting a span
    /// whose tokens see each other: fewer, or as many more as the span at its start needs.
    pub(crate) fn n_in_pass(&self, position: usize, n: usize, most: usize) -> usize {
        let end = position + n.min(most);
        match self.at(end) {
            Some((span, i)) if span.is_uncut() && i > 0 && end < position + n => {
                let end = if span.start > position {
                    span.start
                } else {
                    span.range().end
                };
                (end - position).min(n)
            }
            _ => end - position,
        }
    }

    /// The most tokens of a pass that takes about `most`.
    pub(crate) fn most_in_pass(&self, most: usize) -> usize {
        let uncut = self.0.iter().filter(|span| span.is_uncut());
        uncut.map(|span| span.n).max().unwrap_or(0).max(most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: usize, n: usize, sight: Sight, cells: Option<(usize, usize)>) -> Span {
        Span {
            start,
            n,
            first: 0,
            rows: (0..n * 4).map(|x| x as f32).collect(),
            key: ImageKey([1, start as u64]),
            width: 2,
            n_deep: 1,
            cells,
            sight,
        }
    }

    #[test]
    fn positions_of_grids() {
        let spans = Spans(vec![
            span(2, 6, Sight::Causal, Some((2, 3))),
            span(9, 4, Sight::Causal, Some((1, 4))),
        ]);
        assert_eq!(spans.turns(1), [1; 3]);
        assert_eq!(spans.turns(2), [2, 2, 2]);
        assert_eq!(spans.turns(7), [2, 3, 4]);
        assert_eq!(spans.turns(8), [5; 3]);
        assert_eq!(spans.turns(12), [6, 6, 9]);
        assert_eq!(spans.turns(13), [10; 3]);
        assert_eq!(spans.embedding(3), Some(&[4.0, 5.0][..]));
        assert_eq!(spans.deep(3, 0), Some(&[6.0, 7.0][..]));
        assert_eq!((spans.deep(3, 1), spans.embedding(8)), (None, None));
        let none = ImageKey::default();
        assert_eq!(
            [1, 2, 7, 8, 9].map(|i| spans.key(i)),
            [
                none,
                ImageKey([1, 2]),
                ImageKey([1, 2]),
                none,
                ImageKey([1, 9])
            ]
        );
    }

    #[test]
    fn spans_that_see_themselves_are_not_cut() {
        let spans = Spans(vec![span(4, 6, Sight::Both, None)]);
        assert_eq!(spans.n_in_pass(0, 20, 8), 4);
        assert_eq!(spans.n_in_pass(4, 16, 3), 6);
        let around = Spans(vec![span(60, 10, Sight::Both, None)]);
        assert_eq!(
            [0..20, 0..75, 70..75, 0..130].map(|passed| around.checkpoint(passed)),
            [0, 70, 64, 128]
        );
        assert_eq!(spans.n_in_pass(0, 20, 10), 10);
        assert_eq!(spans.n_in_pass(10, 10, 3), 3);
        assert_eq!(spans.seen(5, 3..6, false), 3..10);
        assert_eq!(spans.seen(9, 7..10, true), 4..10);
        assert_eq!(spans.seen(3, 0..4, true), 0..4);
        assert_eq!(
            (spans.uncut_start(4), spans.uncut_start(5)),
            (None, Some(4))
        );
    }
}
