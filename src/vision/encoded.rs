//! Encoded images, and their form in files.

use crate::kv::ImageKey;
use crate::vision::digest::Digest;
use crate::vision::layout::Parts;
use std::sync::Arc;

const MAGIC: &[u8; 8] = b"ruvllmIM";
/// Version of the file format.
const VERSION: u32 = 1;

/// An encoded image.
#[derive(Debug)]
pub struct Encoded {
    /// `(n, width)`; see [`Encoded::width`].
    pub(super) rows: Arc<[f32]>,
    /// For the prefix cache.
    pub(super) key: ImageKey,
    pub(super) width: usize,
    pub(super) n_deep: usize,
    pub(super) parts: Parts,
}

impl Encoded {
    /// Embeddings, row by row: with deepstack, those of its layers stand beside the main ones.
    pub fn embeddings(&self) -> &[f32] {
        &self.rows
    }

    /// Values of a row.
    pub fn width(&self) -> usize {
        self.width * (1 + self.n_deep)
    }

    /// Number of embeddings.
    pub fn n(&self) -> usize {
        self.rows.len() / self.width()
    }

    /// Rows and columns of embeddings, of images that are one tile.
    pub fn cells(&self) -> (usize, usize) {
        self.parts.cells
    }

    pub(super) fn bytes(&self) -> u64 {
        size_of_val(&*self.rows) as u64
    }
}

impl Encoded {
    /// Contents of a file: what it is, the hash, width, layers of deepstack, the shape of the only
    /// tile, the grid of tiles (0 without one), the number of tiles, the embeddings of each, and the
    /// embeddings.
    pub(super) fn to_file(&self, digest: &Digest) -> Vec<u8> {
        let mut bytes = [&MAGIC[..], digest.bytes()].concat();
        let (cells, grid) = (self.parts.cells, self.parts.grid.unwrap_or_default());
        let tiles = &self.parts.tiles;
        let numbers = [
            VERSION as usize,
            self.width,
            self.n_deep,
            cells.0,
            cells.1,
            grid.0,
            grid.1,
            tiles.len(),
        ];
        let numbers = numbers.iter().chain(tiles);
        bytes.extend(numbers.flat_map(|&n| (n as u32).to_le_bytes()));
        bytes.extend(self.rows.iter().flat_map(|x| x.to_le_bytes()));
        bytes
    }

    /// The image of a file; `None` if it is another one's, or of another version.
    pub(super) fn from_file(bytes: &[u8], digest: &Digest) -> Option<Encoded> {
        let bytes = bytes.strip_prefix(MAGIC)?.strip_prefix(digest.bytes())?;
        let (words, []) = bytes.as_chunks::<4>() else {
            return None;
        };
        let (numbers, rest) = words.split_first_chunk::<8>()?;
        let number = |word: &[u8; 4]| u32::from_le_bytes(*word) as usize;
        let [
            version,
            width,
            n_deep,
            rows,
            columns,
            grid_0,
            grid_1,
            n_tiles,
        ] = numbers.each_ref().map(number);
        // A grid has both sides, or neither.
        if version != VERSION as usize || n_tiles == 0 || (grid_0 == 0) != (grid_1 == 0) {
            return None;
        }
        let (tiles, rest) = rest.split_at_checked(n_tiles)?;
        let tiles: Vec<usize> = tiles.iter().map(number).collect();
        let n: usize = tiles.iter().sum();
        if width == 0 || rest.len() != n.checked_mul(width.checked_mul(1 + n_deep)?)? {
            return None;
        }
        Some(Encoded {
            rows: rest.iter().map(|&word| f32::from_le_bytes(word)).collect(),
            key: digest.key(),
            width,
            n_deep,
            parts: Parts {
                tiles,
                grid: Some((grid_0, grid_1)).filter(|grid| *grid != (0, 0)),
                cells: (rows, columns),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files() {
        let image = Encoded {
            rows: (0..12).map(|x| x as f32).collect(),
            key: Digest::new().finish().key(),
            width: 2,
            n_deep: 1,
            parts: Parts {
                tiles: vec![1, 2],
                grid: Some((2, 1)),
                cells: (1, 1),
            },
        };
        let digest = Digest::new().finish();
        let bytes = image.to_file(&digest);
        let read = Encoded::from_file(&bytes, &digest).unwrap();
        assert_eq!(format!("{read:?}"), format!("{image:?}"));
        for end in 0..bytes.len() {
            assert!(Encoded::from_file(&bytes[..end], &digest).is_none());
        }
        let mut other = Digest::new();
        other.add(b"x");
        assert!(Encoded::from_file(&bytes, &other.finish()).is_none());
    }
}
