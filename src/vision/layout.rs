//! Tokens around and between the embeddings of an image in a prompt.

use crate::vision::sizes::Size;

/// A piece of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutPart {
    /// Text, whose special tokens are read as such.
    Text(String),
    /// That many embeddings, the next of the image.
    Embeddings(usize),
}

/// What stands where an image is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// Embeddings of all tiles between two texts.
    Between(&'static str, &'static str),
    /// Pixtral: rows end with a token each, the last with another.
    Rows,
    /// Idefics 3.
    Idefics,
    /// LFM2-VL.
    Lfm,
    /// MiniCPM-V 4.6.
    MiniCpm,
    /// Llama 4.
    Llama4,
}

/// What a layout depends on.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    /// Embeddings of each tile.
    pub(super) tiles: Vec<usize>,
    /// Columns and rows of the parts.
    pub(super) grid: Option<Size>,
    /// Rows and columns of embeddings, of images that are one tile.
    pub(super) cells: (usize, usize),
}

/// A list of pieces in which adjacent texts are one.
#[derive(Default)]
struct Pieces(Vec<LayoutPart>);

impl Pieces {
    fn text(&mut self, text: &str) {
        match self.0.last_mut() {
            Some(LayoutPart::Text(last)) => last.push_str(text),
            _ if text.is_empty() => {}
            _ => self.0.push(LayoutPart::Text(text.to_owned())),
        }
    }

    fn rows(&mut self, n: usize) {
        self.0.push(LayoutPart::Embeddings(n));
    }
}

impl Layout {
    /// The pieces of an image, which is the `index`-th of its prompt, from 0.
    pub(super) fn pieces(self, parts: &Parts, index: usize) -> Vec<LayoutPart> {
        let mut to = Pieces::default();
        let (columns, _) = parts.grid.unwrap_or((1, 1));
        // Tiles that are parts; besides them there may be the whole.
        let n_parts = parts.grid.map_or(0, |(columns, rows)| columns * rows);
        let n_parts = n_parts.min(parts.tiles.len().saturating_sub(1));
        match self {
            Layout::Between(before, after) => {
                to.text(before);
                to.rows(parts.tiles.iter().sum());
                to.text(after);
            }
            Layout::Rows => {
                for row in 0..parts.cells.0 {
                    to.rows(parts.cells.1);
                    let is_last = row + 1 == parts.cells.0;
                    to.text(if is_last { "[IMG_END]" } else { "[IMG_BREAK]" });
                }
            }
            Layout::Idefics => {
                for (i, &n) in parts.tiles[..n_parts].iter().enumerate() {
                    let (row, column) = (i / columns + 1, i % columns + 1);
                    to.text(&format!(
                        "<fake_token_around_image><row_{row}_col_{column}>"
                    ));
                    to.rows(n);
                    to.text(if column == columns { "\n" } else { "" });
                }
                to.text(if n_parts > 0 { "\n" } else { "" });
                to.text("<fake_token_around_image><global-img>");
                to.rows(parts.tiles[n_parts]);
                to.text("<fake_token_around_image>");
            }
            Layout::Lfm => {
                to.text("<|image_start|>");
                for (i, &n) in parts.tiles[..n_parts].iter().enumerate() {
                    let (row, column) = (i / columns + 1, i % columns + 1);
                    to.text(&format!("<|img_row_{row}_col_{column}|>"));
                    to.rows(n);
                }
                to.text(if n_parts > 0 { "<|img_thumbnail|>" } else { "" });
                to.rows(parts.tiles[n_parts]);
                to.text("<|image_end|>");
            }
            Layout::MiniCpm => {
                to.text(&format!("<image_id>{index}</image_id><image>"));
                to.rows(parts.tiles[0]);
                to.text("</image>");
                for (i, &n) in parts.tiles[1..].iter().enumerate() {
                    to.text(if i > 0 && i % columns == 0 { "\n" } else { "" });
                    to.text("<slice>");
                    to.rows(n);
                    to.text("</slice>");
                }
            }
            Layout::Llama4 => {
                to.text("<|image_start|>");
                if parts.tiles.len() > 1 {
                    for (i, &n) in parts.tiles[..n_parts].iter().enumerate() {
                        to.rows(n);
                        let is_last = (i + 1) % columns == 0;
                        to.text(if is_last {
                            "<|tile_y_separator|>"
                        } else {
                            "<|tile_x_separator|>"
                        });
                    }
                }
                to.text("<|image|>");
                to.rows(parts.tiles.last().copied().unwrap_or(0));
                to.text("<|image_end|>");
            }
        }
        to.0
    }
}

/// Positions of an image's embeddings in the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextPositions {
    /// One after the other, as of text.
    Plain,
    /// M-RoPE: of time, row and column.
    Grid,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_joined() {
        let parts = Parts {
            tiles: vec![2, 2, 2],
            grid: Some((2, 1)),
            cells: (1, 2),
        };
        let text = |pieces: &[LayoutPart]| {
            let of = |piece: &LayoutPart| match piece {
                LayoutPart::Text(text) => text.clone(),
                LayoutPart::Embeddings(n) => "E".repeat(*n),
            };
            pieces.iter().map(of).collect::<String>()
        };
        let idefics = Layout::Idefics.pieces(&parts, 0);
        assert_eq!(idefics.len(), 7);
        let f = "<fake_token_around_image>";
        let expected = format!("{f}<row_1_col_1>EE{f}<row_1_col_2>EE\n\n{f}<global-img>EE{f}");
        assert_eq!(text(&idefics), expected);
        let of = text(&Layout::MiniCpm.pieces(&parts, 3));
        assert_eq!(
            of,
            "<image_id>3</image_id><image>EE</image><slice>EE</slice><slice>EE</slice>"
        );
    }
}
