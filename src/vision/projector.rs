//! Projectors: from images to embeddings of a model.

use crate::arch::Arch;
use crate::compute::arena::Arena;
use crate::gguf::Gguf;
use crate::layers::hparams::Hparams;
use crate::layers::spans::{Sight, Span};
use crate::model::Model;
use crate::threads::PoolHandle;
use crate::vision::VisionError;
use crate::vision::cache::EncodedCache;
use crate::vision::digest::Digest;
use crate::vision::encoded::Encoded;
use crate::vision::file::{File, out_of_range};
use crate::vision::grid::Grid;
use crate::vision::image::Image;
use crate::vision::kinds::{KINDS, Kind, Sizes, Tower, unpadded};
use crate::vision::layout::{LayoutPart, Parts, TextPositions};
use crate::vision::preprocess::{ImageOptions, MAX_PATCHES, Pixels, Tiles};
use crate::vision::vit::Machine;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Most embeddings of one image.
const MAX_EMBEDDINGS: usize = 1 << 17;

/// An encoder of images with its projector, from a file of its own (mmproj). Cheap to clone.
///
/// Images that were encoded are kept, by the hash of their pixels and options: the second turn
/// about an image computes no encoder.
#[derive(Clone)]
pub struct Projector(Arc<Inner>);

struct Inner {
    gguf: Gguf,
    arch: Arch,
    kind: &'static Kind,
    tower: Tower,
    sight: Sight,
    n_embd: usize,
    place: u32,
    /// Hash of everything of which embeddings depend besides image and options.
    digest: Digest,
    cache: EncodedCache,
    n_encoded: AtomicU64,
}

impl fmt::Debug for Projector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Projector({})", self.kind())
    }
}

impl Projector {
    /// Opens a projector's file for `model`.
    ///
    /// # Errors
    /// If the file is no projector, of a kind that this build does not know, or for another model.
    pub fn open(path: impl AsRef<Path>, model: &Model) -> Result<Projector, VisionError> {
        Projector::from_gguf(Gguf::open(path)?, model)
    }

    /// A projector in an opened file.
    ///
    /// # Errors
    /// As [`Projector::open`].
    pub fn from_gguf(gguf: Gguf, model: &Model) -> Result<Projector, VisionError> {
        let kind = kind(&gguf)?;
        let h = model.hparams();
        if !kind.of_models.contains(&h.arch.as_str()) {
            let what = format!(
                "a projector of type {:?} is for {}, not {}",
                kind.name,
                kind.of_models.join(", "),
                h.arch
            );
            return Err(VisionError::OtherModel { what });
        }
        let file = File::new(&gguf)?;
        if let Some(n) = file
            .opt_count("projection_dim", 1 << 17)?
            .filter(|n| *n != h.n_embd)
        {
            let what = format!("it makes embeddings of {n}, the model has {}", h.n_embd);
            return Err(VisionError::OtherModel { what });
        }
        let sizes = Sizes::of(&file, h.n_embd)?;
        let mut tower = (kind.bind)(&file, &sizes)?;
        let dim = tower.vit.heads.dim;
        if tower.vit.rope.is_some() && !dim.is_multiple_of(4) {
            let expected = format!("heads whose width, here {dim}, is a multiple of 4");
            return Err(out_of_range(
                "attention.head_count",
                sizes.n_head,
                &expected,
            ));
        }
        tower.vit.shapes = file.shapes()?;
        let n_deep = tower.vit.deepstack.len();
        if n_deep > h.n_layer {
            let what = format!("{n_deep} layers of deepstack for {} layers", h.n_layer);
            return Err(VisionError::OtherModel { what });
        }
        let place = model
            .tokenizer()
            .and_then(|tokenizer| tokenizer.token_id(tower.place.as_bytes()));
        let (sight, arch) = ((tower.sight)(h), model.arch());
        let mut digest = Digest::new();
        for text in [kind.name, arch.name()] {
            digest.add(text.as_bytes());
        }
        digest.add(&gguf.fingerprint().to_le_bytes());
        digest.add(&crate::arch::ARITHMETIC_VERSION.to_le_bytes());
        Ok(Projector(Arc::new(Inner {
            arch,
            kind,
            sight,
            n_embd: h.n_embd,
            place: place.filter(|id| (*id as usize) < h.n_vocab).unwrap_or(0),
            digest: digest.finish(),
            cache: EncodedCache::default(),
            n_encoded: AtomicU64::new(0),
            tower,
            gguf,
        })))
    }

    /// `clip.projector_type` of its file.
    pub fn kind(&self) -> &'static str {
        self.0.kind.name
    }

    /// The file.
    pub fn gguf(&self) -> &Gguf {
        &self.0.gguf
    }

    /// What stands for an image in prompts of this kind, the longest first.
    pub fn markers(&self) -> &'static [&'static str] {
        self.0.tower.markers
    }

    /// The token whose id stands in the places of embeddings.
    pub fn placeholder(&self) -> u32 {
        self.0.place
    }

    /// Number of images that were encoded, not found in the cache.
    pub fn n_encoded(&self) -> u64 {
        self.0.n_encoded.load(Ordering::Relaxed)
    }

    /// Most bytes of encoded images that are kept. Default 256 MiB.
    pub fn set_cache_budget(&self, bytes: u64) {
        self.0.cache.set_budget(bytes);
    }

    /// Whether the model that is to read its embeddings is the one it was opened for.
    pub(crate) fn is_for(&self, h: &Hparams) -> bool {
        h.n_embd == self.0.n_embd && self.0.kind.of_models.contains(&h.arch.as_str())
    }

    fn tiles(&self, image: &Image, options: ImageOptions) -> Result<Tiles, VisionError> {
        let tiles = self.0.tower.preprocess.tiles(image, options)?;
        for tile in &tiles.images {
            let (width, height) = tile.size();
            let p = self.0.tower.vit.patch;
            let n = (width / p) * (height / p);
            if n > MAX_PATCHES {
                return Err(VisionError::TooManyPatches {
                    width: image.width(),
                    height: image.height(),
                    n: n as u64,
                    max: MAX_PATCHES as u64,
                });
            }
        }
        Ok(tiles)
    }

    /// The pixels that the encoder reads, for each tile in the order of the prompt.
    ///
    /// # Errors
    /// If the image is too narrow for the kind, or an option makes no sense.
    pub fn pixels(&self, image: &Image, options: ImageOptions) -> Result<Vec<Pixels>, VisionError> {
        let Tower { mean, std, .. } = self.0.tower;
        let tiles = self.tiles(image, options)?;
        Ok(tiles
            .images
            .iter()
            .map(|tile| Pixels::of(tile, mean, std))
            .collect())
    }

    /// The pieces of a prompt in which this image is the `index`-th, from 0.
    pub fn pieces(&self, encoded: &Encoded, index: usize) -> Vec<LayoutPart> {
        self.0.tower.layout.pieces(&encoded.parts, index)
    }

    /// Embeddings `rows` of an image as a span of a text.
    pub(crate) fn span(
        &self,
        encoded: &Encoded,
        rows: std::ops::Range<usize>,
        start: usize,
    ) -> Span {
        Span {
            start,
            n: rows.len(),
            first: rows.start,
            rows: Arc::clone(&encoded.rows),
            width: encoded.width,
            n_deep: encoded.n_deep,
            cells: match self.0.tower.positions {
                TextPositions::Grid => Some(encoded.parts.cells),
                TextPositions::Plain => None,
            },
            sight: self.0.sight,
        }
    }

    /// Encodes an image, unless it is in the cache.
    pub(crate) fn encode(
        &self,
        threads: &PoolHandle<'_>,
        arena: &mut Arena,
        image: &Image,
        options: ImageOptions,
    ) -> Result<Arc<Encoded>, VisionError> {
        let digest = self.digest_of(image, options);
        if let Some(encoded) = self.0.cache.get(&digest) {
            return Ok(encoded);
        }
        let encoded = Arc::new(self.compute(threads, arena, image, options)?);
        self.0.n_encoded.fetch_add(1, Ordering::Relaxed);
        self.0.cache.put(digest, &encoded);
        Ok(encoded)
    }

    /// An image that was encoded before with these options.
    pub(crate) fn cached(&self, image: &Image, options: ImageOptions) -> Option<Arc<Encoded>> {
        self.0.cache.get(&self.digest_of(image, options))
    }

    fn digest_of(&self, image: &Image, options: ImageOptions) -> Digest {
        let mut digest = Digest::new();
        digest.add(self.0.digest.bytes());
        for bound in [options.min_tokens, options.max_tokens] {
            let bound = bound.map_or(u64::MAX, |n| n as u64);
            digest.add(&bound.to_le_bytes());
        }
        digest.add(&image.width().to_le_bytes());
        digest.add(&image.height().to_le_bytes());
        digest.add(image.rgb());
        digest.finish()
    }

    fn compute(
        &self,
        threads: &PoolHandle<'_>,
        arena: &mut Arena,
        image: &Image,
        options: ImageOptions,
    ) -> Result<Encoded, VisionError> {
        let Inner {
            arch, tower, gguf, ..
        } = &*self.0;
        let tiles = self.tiles(image, options)?;
        let vit = &tower.vit;
        let machine = Machine {
            arch: *arch,
            threads,
            gguf,
        };
        let (mut rows, mut of_tiles, mut cells) = (Vec::new(), Vec::new(), (0, 0));
        for tile in &tiles.images {
            let (width, height) = tile.size();
            let (block, window) = tower.order;
            let (r, c) = (height / vit.patch, width / vit.patch);
            let grid = if window > 1 {
                Grid::in_windows(r, c, block, window)
            } else {
                Grid::in_blocks(r, c, block)
            };
            if vit
                .positions
                .as_ref()
                .is_some_and(|positions| !positions.has(r, c))
            {
                let max = vit
                    .positions
                    .as_ref()
                    .map_or(0, |positions| positions.n as u64);
                return Err(VisionError::TooManyPatches {
                    width: image.width(),
                    height: image.height(),
                    n: grid.n() as u64,
                    max,
                });
            }
            let shape = vit.result(&grid);
            cells = shape.grid;
            of_tiles.push(shape.n());
            if of_tiles.iter().sum::<usize>() > MAX_EMBEDDINGS {
                return Err(VisionError::TooManyPatches {
                    width: image.width(),
                    height: image.height(),
                    n: grid.n() as u64,
                    max: MAX_EMBEDDINGS as u64,
                });
            }
            let pixels = Pixels::of(tile, tower.mean, tower.std);
            rows.extend(vit.encode(machine, arena, &grid, &pixels)?);
        }
        if let (Some(newline), Some(grid)) = (&tower.newline, tiles.grid) {
            rows = unpadded(&rows, newline, cells.0, grid, image.size());
            of_tiles = vec![rows.len() / self.0.n_embd];
        }
        Ok(Encoded {
            rows: rows.into(),
            width: self.0.n_embd,
            n_deep: vit.deepstack.len(),
            parts: Parts {
                tiles: of_tiles,
                grid: tiles.grid,
                cells,
            },
        })
    }
}

/// The kind of a projector's file.
fn kind(gguf: &Gguf) -> Result<&'static Kind, VisionError> {
    let metadata = gguf.metadata();
    let architecture = metadata
        .opt_str("general.architecture")?
        .unwrap_or_default();
    if architecture != "clip" {
        let what = format!("its architecture is {architecture:?}, not \"clip\"");
        return Err(VisionError::NotAProjector { what });
    }
    if metadata
        .opt_bool("clip.has_audio_encoder")?
        .unwrap_or(false)
    {
        let what = "it encodes audio, which this build does not read".into();
        return Err(VisionError::NotAProjector { what });
    }
    let name = match metadata.opt_str("clip.projector_type")? {
        Some(name) => Some(name),
        None => metadata.opt_str("clip.vision.projector_type")?,
    };
    let name = name.ok_or_else(|| VisionError::MissingKey {
        key: "clip.projector_type".into(),
    })?;
    KINDS
        .iter()
        .find(|kind| kind.name == name)
        .ok_or_else(|| VisionError::UnsupportedKind {
            kind: name.to_owned(),
            supported: KINDS.iter().map(|kind| kind.name).collect(),
        })
}

/// What stands for an image in prompts of every kind.
const MARKER: &str = "<__media__>";

impl Projector {
    /// The texts of a prompt around its images: one more than there are images. An image is the
    /// kind's own marker, or `<__media__>`.
    pub fn texts_around<'t>(&self, mut prompt: &'t str) -> Vec<&'t str> {
        let markers = self.markers().iter().copied().chain([MARKER]);
        let mut texts = Vec::new();
        loop {
            // Markers of which another is a part come first.
            let next = markers
                .clone()
                .filter_map(|marker| Some((prompt.find(marker)?, marker.len())))
                .min_by_key(|&(start, len)| (start, std::cmp::Reverse(len)));
            let Some((start, len)) = next else {
                texts.push(prompt);
                return texts;
            };
            texts.push(&prompt[..start]);
            prompt = &prompt[start + len..];
        }
    }
}
