//! Projectors: from images to embeddings of a model.

use crate::arch::Arch;
use crate::compute::arena::Arena;
use crate::gguf::{Gguf, Metadata};
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
use crate::vision::kinds::{KINDS, Kind, Sizes, Tower, n_unpadded, unpadded};
use crate::vision::layout::{LayoutPart, Parts, TextPositions};
use crate::vision::preprocess::{ImageOptions, MAX_PATCHES, Pixels, Tiles};
use crate::vision::vit::Machine;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Changes with the bits of embeddings beside [`ARITHMETIC_VERSION`]: 2 since attention is computed
/// by the kernel of text.
///
/// [`ARITHMETIC_VERSION`]: crate::arch::ARITHMETIC_VERSION
const ENCODER_VERSION: u32 = 2;
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
        let h = model.hparams();
        if h.diffusion.is_some() {
            let arch = h.arch.clone();
            return Err(VisionError::Denoises { arch });
        }
        let kind = kind(gguf.metadata())?;
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
        for version in [crate::arch::ARITHMETIC_VERSION, ENCODER_VERSION] {
            digest.add(&version.to_le_bytes());
        }
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
    fn markers(&self) -> &'static [&'static str] {
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

    /// Keeps encoded images in a folder, too, which may hold that many bytes; the first folder that
    /// is set stays. The least recently used are removed first.
    ///
    /// # Errors
    /// If the folder cannot be used.
    pub fn set_cache_folder(&self, path: impl AsRef<Path>, budget: u64) -> Result<(), VisionError> {
        let path = path.as_ref();
        let failed = |error| VisionError::Folder {
            path: path.to_owned(),
            error: Arc::new(error),
        };
        self.0.cache.set_folder(path, budget).map_err(failed)
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

    /// The same of an image that need not have been encoded, and is not.
    ///
    /// # Errors
    /// If the image is too narrow for the kind, or an option makes no sense.
    pub(crate) fn pieces_of(
        &self,
        image: &Image,
        options: ImageOptions,
        index: usize,
    ) -> Result<Vec<LayoutPart>, VisionError> {
        if let Some(encoded) = self.cached(image, options) {
            return Ok(self.pieces(&encoded, index));
        }
        let (_, parts) = self.shapes(image, &self.tiles(image, options)?)?;
        Ok(self.0.tower.layout.pieces(&parts, index))
    }

    /// What an image would take on so many threads. Encodes nothing.
    ///
    /// # Errors
    /// If the image is too narrow for the kind, or an option makes no sense.
    pub fn memory(
        &self,
        image: &Image,
        options: ImageOptions,
        n_threads: usize,
    ) -> Result<ImageMemory, VisionError> {
        let Inner {
            gguf,
            arch,
            tower: Tower { vit, layout, .. },
            ..
        } = &*self.0;
        let (grids, parts) = self.shapes(image, &self.tiles(image, options)?)?;
        let of_tiles = grids.iter();
        let of_tiles = of_tiles.map(|grid| vit.buffer_bytes(*arch, n_threads, grid));
        let n_placed = layout
            .pieces(&parts, 0)
            .into_iter()
            .map(|piece| match piece {
                LayoutPart::Embeddings(n) => n,
                LayoutPart::Text(_) => 0,
            });
        let n_tokens: usize = n_placed.sum();
        let n_values = n_tokens * self.0.n_embd * (1 + vit.deepstack.len());
        Ok(ImageMemory {
            weights: gguf.tensors().iter().map(|t| t.n_bytes).sum(),
            encoder: of_tiles.max().unwrap_or(0),
            embeddings: (n_values * size_of::<f32>()) as u64,
            n_tokens,
        })
    }

    /// Whether [`ImageOptions`] bound the tokens of its images.
    pub fn is_bounded(&self) -> bool {
        self.0.tower.preprocess.is_bounded()
    }

    /// Embeddings `rows` of an image as a span of a text.
    pub(crate) fn span(&self, encoded: &Encoded, rows: Range<usize>, start: usize) -> Span {
        Span {
            start,
            n: rows.len(),
            first: rows.start,
            rows: Arc::clone(&encoded.rows),
            key: encoded.key,
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
        if let Some(encoded) = self.known(&digest) {
            return Ok(encoded);
        }
        let encoded = Arc::new(self.compute(threads, arena, image, options, &digest)?);
        self.0.n_encoded.fetch_add(1, Ordering::Relaxed);
        self.0.cache.put(digest, &encoded);
        Ok(encoded)
    }

    /// An image that was encoded before with these options.
    pub(crate) fn cached(&self, image: &Image, options: ImageOptions) -> Option<Arc<Encoded>> {
        self.known(&self.digest_of(image, options))
    }

    /// What the cache has; not a file in its folder that has another shape than this kind makes.
    fn known(&self, digest: &Digest) -> Option<Arc<Encoded>> {
        let encoded = self.0.cache.get(digest)?;
        let Tower {
            vit,
            layout,
            positions,
            ..
        } = &self.0.tower;
        let n_placed = |piece: LayoutPart| match piece {
            LayoutPart::Embeddings(n) => n,
            LayoutPart::Text(_) => 0,
        };
        let pieces = layout.pieces(&encoded.parts, 0).into_iter();
        let n: usize = pieces.map(n_placed).sum();
        let cells = encoded.parts.cells;
        let is_sound = (encoded.width, encoded.n_deep) == (self.0.n_embd, vit.deepstack.len())
            && n == encoded.n()
            && (*positions == TextPositions::Plain || cells.0 * cells.1 == n);
        Some(encoded).filter(|_| is_sound)
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
        digest: &Digest,
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
        let (grids, parts) = self.shapes(image, &tiles)?;
        let mut rows = Vec::new();
        for (tile, grid) in tiles.images.iter().zip(&grids) {
            let pixels = Pixels::of(tile, tower.mean, tower.std);
            rows.extend(vit.encode(machine, arena, grid, &pixels)?);
        }
        if let (Some(newline), Some(grid)) = (&tower.newline, tiles.grid) {
            rows = unpadded(&rows, newline, parts.cells.0, grid, image.size());
        }
        Ok(Encoded {
            rows: rows.into(),
            key: digest.key(),
            width: self.0.n_embd,
            n_deep: vit.deepstack.len(),
            parts,
        })
    }

    /// Grids of patches of an image's tiles, and how many embeddings they become.
    fn shapes(&self, image: &Image, tiles: &Tiles) -> Result<(Vec<Grid>, Parts), VisionError> {
        let Tower {
            vit,
            order: (block, window),
            newline,
            ..
        } = &self.0.tower;
        let too_many = |grid: &Grid, max: usize| VisionError::TooManyPatches {
            width: image.width(),
            height: image.height(),
            n: grid.n() as u64,
            max: max as u64,
        };
        let (mut grids, mut of_tiles, mut cells) = (Vec::new(), Vec::new(), (0, 0));
        for tile in &tiles.images {
            let (width, height) = tile.size();
            let (r, c) = (height / vit.patch, width / vit.patch);
            let grid = if *window > 1 {
                Grid::in_windows(r, c, *block, *window)
            } else {
                Grid::in_blocks(r, c, *block)
            };
            if let Some(positions) = vit.positions.as_ref().filter(|of| !of.has(r, c)) {
                return Err(too_many(&grid, positions.n));
            }
            let shape = vit.result(&grid);
            cells = shape.grid;
            of_tiles.push(shape.n());
            if of_tiles.iter().sum::<usize>() > MAX_EMBEDDINGS {
                return Err(too_many(&grid, MAX_EMBEDDINGS));
            }
            grids.push(grid);
        }
        if let (Some(_), Some(grid)) = (newline, tiles.grid) {
            of_tiles = vec![n_unpadded(cells.0, grid, image.size())];
        }
        let parts = Parts {
            tiles: of_tiles,
            grid: tiles.grid,
            cells,
        };
        Ok((grids, parts))
    }
}

/// What an image takes beside the model, see [`Projector::memory`]. Keys and values of its tokens are
/// as those of a text's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImageMemory {
    /// Bytes of the projector's weights, in its mapped file.
    pub weights: u64,
    /// Bytes of the encoder's buffers while it computes the largest tile; the engine keeps them.
    pub encoder: u64,
    /// Bytes of its embeddings, which a text keeps.
    pub embeddings: u64,
    /// Embeddings that it becomes: positions in the context.
    pub n_tokens: usize,
}

/// What the header of a projector's file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProjectorInfo {
    /// `clip.projector_type`.
    pub kind: &'static str,
    /// Architectures of models that it may be for.
    pub models: &'static [&'static str],
    /// Width of the embeddings, if the file tells it.
    pub n_embd: Option<u32>,
    /// Side of the images that the encoder was made for, in pixels.
    pub image_size: Option<u32>,
    /// Side of a patch, in pixels.
    pub patch_size: Option<u32>,
}

impl ProjectorInfo {
    /// That of a file with this metadata.
    ///
    /// # Errors
    /// If it is no projector, or of a kind that this build does not know.
    pub fn of(metadata: &Metadata) -> Result<ProjectorInfo, VisionError> {
        let kind = kind(metadata)?;
        let number = |name: &str| metadata.opt_u32(&format!("clip.vision.{name}"));
        Ok(ProjectorInfo {
            kind: kind.name,
            models: kind.of_models,
            n_embd: number("projection_dim")?,
            image_size: number("image_size")?,
            patch_size: number("patch_size")?,
        })
    }
}

/// The kind of a projector's file.
fn kind(metadata: &Metadata) -> Result<&'static Kind, VisionError> {
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
    pub fn texts_around<'t>(&self, prompt: &'t str) -> Vec<&'t str> {
        let (mut texts, mut at) = (Vec::new(), 0);
        for marker in self.find_markers(prompt) {
            texts.push(&prompt[at..marker.start]);
            at = marker.end;
        }
        texts.push(&prompt[at..]);
        texts
    }

    /// Where a text has what stands for an image: the kind's own marker, or `<__media__>`.
    pub fn find_markers(&self, text: &str) -> Vec<Range<usize>> {
        let markers = self.markers().iter().copied().chain([MARKER]);
        let (mut found, mut at) = (Vec::new(), 0);
        loop {
            // Markers of which another is a part come first.
            let next = markers
                .clone()
                .filter_map(|marker| Some((text[at..].find(marker)?, marker.len())))
                .min_by_key(|&(start, len)| (start, std::cmp::Reverse(len)));
            let Some((start, len)) = next else {
                return found;
            };
            found.push(at + start..at + start + len);
            at += start + len;
        }
    }
}
