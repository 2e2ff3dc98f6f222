//! Importance matrices: how large the inputs of each weight are on a text, in the files of
//! llama.cpp's `llama-imatrix`. They hold `Σ x²` of each column of a matrix and the number of rows
//! `x`, apart for each expert of a stack.
//!
//! The newer files are GGUF with two tensors for each matrix, `NAME.in_sum2` and `NAME.counts`; the
//! older ones (`.dat`) hold means times the number of chunks.

use crate::gguf::{Array, Gguf, GgufError, NewFile, TensorInfo, Value, Writer};
use crate::quant::DType;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

/// Tokens of a chunk, where a file does not tell.
const CHUNK: u32 = 512;

/// Longest name, and most values of a matrix, in an older file.
const MAX_NAME: usize = 1 << 12;

/// An importance matrix for each matrix of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Importance {
    /// Sums of each tensor, by its name.
    pub of: BTreeMap<String, Sums>,
    /// Texts that it was computed with.
    pub datasets: Vec<String>,
    /// Chunks of them.
    pub n_chunks: u32,
    /// Tokens of a chunk.
    pub chunk: u32,
}

/// Sums of a tensor.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sums {
    /// `Σ x²` of each column of each matrix of a stack.
    pub squares: Vec<f32>,
    /// Number of rows, for each matrix; or one number for all.
    pub counts: Vec<f32>,
}

/// Format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ImportanceFormat {
    /// The newer one.
    #[default]
    Gguf,
    /// The older one, which has no counts of experts.
    Dat,
}

/// Failures of reading, adding and using importance matrices.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportanceError {
    /// A file cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The container of a newer file is damaged.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A file holds something else.
    #[error("{0}")]
    Contents(String),
    /// Two matrices are of different models.
    #[error("{tensor} has another shape: they are of different models")]
    Different {
        /// The tensor that differs.
        tensor: String,
    },
    /// A matrix is of another model than a tensor.
    #[error(
        "tensor {tensor}: the importance matrix has {n} values, the tensor {n_matrices} × {n_columns} columns; it is of another model"
    )]
    OtherShape {
        /// The tensor.
        tensor: String,
        /// Values that the matrix has of it.
        n: usize,
        /// Matrices in the tensor.
        n_matrices: usize,
        /// Columns of each.
        n_columns: usize,
    },
}

impl Importance {
    /// Reads a file of either format.
    ///
    /// # Errors
    /// If it is damaged, or holds what cannot be such sums.
    pub fn read(path: &Path) -> Result<Importance, ImportanceError> {
        let wrong = ImportanceError::Contents;
        let bytes = std::fs::read(path)?;
        let importance = match bytes.starts_with(b"GGUF") {
            true => from_gguf(&Gguf::from_bytes(bytes)?),
            false => from_dat(&bytes),
        };
        let importance = importance.map_err(wrong)?;
        if importance.of.is_empty() {
            return Err(wrong("no sums of any tensor are in it".into()));
        }
        for (name, sums) in &importance.of {
            let not_a_sum = |x: &f32| !x.is_finite() || *x < 0.0;
            let (squares, counts) = (&sums.squares, &sums.counts);
            if let Some(i) = squares.iter().position(not_a_sum) {
                let text = format!("{name}: sum {i} is {}", squares[i]);
                return Err(wrong(format!("{text}; the file is damaged")));
            }
            if let Some(i) = counts.iter().position(not_a_sum) {
                let text = format!("{name}: count {i} is {}", counts[i]);
                return Err(wrong(format!("{text}; the file is damaged")));
            }
            if counts.is_empty() || !squares.len().is_multiple_of(counts.len()) {
                let text = format!("{} sums of {} matrices", squares.len(), counts.len());
                return Err(wrong(format!("{name}: {text}")));
            }
        }
        Ok(importance)
    }

    /// Adds another one of the same model.
    ///
    /// # Errors
    /// If a tensor has another shape there.
    pub fn add(&mut self, other: &Importance) -> Result<(), ImportanceError> {
        for (name, theirs) in &other.of {
            let Some(ours) = self.of.get_mut(name) else {
                self.of.insert(name.clone(), theirs.clone());
                continue;
            };
            let n = ours.counts.len().max(theirs.counts.len());
            for counts in [&ours.counts, &theirs.counts] {
                if counts.len() != n && counts.len() != 1
                    || ours.squares.len() != theirs.squares.len()
                {
                    return Err(ImportanceError::Different {
                        tensor: name.clone(),
                    });
                }
            }
            let count = |counts: &[f32], i: usize| counts[if counts.len() == 1 { 0 } else { i }];
            let counts = (0..n).map(|i| count(&ours.counts, i) + count(&theirs.counts, i));
            ours.counts = counts.collect();
            for (ours, theirs) in ours.squares.iter_mut().zip(&theirs.squares) {
                *ours += theirs;
            }
        }
        self.datasets.extend(other.datasets.iter().cloned());
        self.n_chunks = self.n_chunks.saturating_add(other.n_chunks);
        if self.chunk == 0 {
            self.chunk = other.chunk;
        }
        Ok(())
    }

    /// Keeps the tensors whose names contain one of `include`, if there are any, and none of
    /// `exclude`.
    pub fn keep(&mut self, include: &[String], exclude: &[String]) {
        let has = |parts: &[String], name: &str| parts.iter().any(|part| name.contains(part));
        self.of
            .retain(|name, _| (include.is_empty() || has(include, name)) && !has(exclude, name));
    }

    /// Mean squares for each weight of a row of each matrix of a tensor; `None` if nothing is known
    /// of it. Of experts that no token has reached all are alike.
    ///
    /// # Errors
    /// If the shape is another one.
    pub fn means(&self, name: &str, dims: &[u64]) -> Result<Option<Vec<f32>>, ImportanceError> {
        let Some(sums) = self.of.get(name) else {
            return Ok(None);
        };
        let n = dims[0] as usize;
        let n_matrices = dims.iter().skip(2).product::<u64>() as usize;
        if sums.squares.len() != n * n_matrices {
            return Err(ImportanceError::OtherShape {
                tensor: name.to_owned(),
                n: sums.squares.len(),
                n_matrices,
                n_columns: n,
            });
        }
        let per_count = sums.squares.len() / sums.counts.len();
        let means = sums.squares.iter().enumerate().map(|(i, square)| {
            let count = sums.counts[i / per_count];
            if count > 0.0 { square / count } else { 1.0 }
        });
        Ok(Some(means.collect()))
    }

    /// Writes a file.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, path: &Path, format: ImportanceFormat) -> Result<(), ImportanceError> {
        match format {
            ImportanceFormat::Gguf => Ok(self.to_gguf().write(path)?),
            ImportanceFormat::Dat => {
                let mut file = NewFile::create(path, false)?;
                file.write_all(&self.to_dat())?;
                Ok(file.finish()?)
            }
        }
    }

    fn to_gguf(&self) -> Writer<'static> {
        let mut writer = Writer::new();
        writer.overwrite();
        let datasets: Vec<&str> = self.datasets.iter().map(String::as_str).collect();
        writer
            .metadata("general.type", "imatrix")
            .metadata(
                "imatrix.datasets",
                Value::Array(Array::Strings(datasets.into_iter().collect())),
            )
            .metadata("imatrix.chunk_count", self.n_chunks)
            .metadata("imatrix.chunk_size", self.chunk);
        for (name, sums) in &self.of {
            let n_matrices = sums.counts.len() as u64;
            let n = sums.squares.len() as u64 / n_matrices;
            let bytes = |x: &[f32]| -> Vec<u8> { x.iter().flat_map(|x| x.to_le_bytes()).collect() };
            let squares = bytes(&sums.squares);
            writer.tensor(
                format!("{name}.in_sum2"),
                &[n, n_matrices],
                DType::F32,
                squares,
            );
            let counts = bytes(&sums.counts);
            writer.tensor(
                format!("{name}.counts"),
                &[1, n_matrices],
                DType::F32,
                counts,
            );
        }
        writer
    }

    /// The older format; it has no counts of experts, so means of those that were never reached are
    /// 1.
    fn to_dat(&self) -> Vec<u8> {
        let reached = |sums: &&Sums| sums.counts.iter().any(|&count| count > 0.0);
        let n_entries = self.of.values().filter(reached).count();
        let mut out = Vec::new();
        let number = |out: &mut Vec<u8>, n: usize| out.extend((n as i32).to_le_bytes());
        number(&mut out, n_entries);
        let chunk = self.chunk.max(1) as f32;
        for (name, sums) in self.of.iter().filter(|(_, sums)| reached(sums)) {
            number(&mut out, name.len());
            out.extend(name.as_bytes());
            let most = sums.counts.iter().fold(0.0, |m: f32, &c| m.max(c));
            let n_chunks = (most / chunk).ceil();
            number(&mut out, n_chunks as usize);
            number(&mut out, sums.squares.len());
            let per_count = sums.squares.len() / sums.counts.len();
            for (i, square) in sums.squares.iter().enumerate() {
                let count = sums.counts[i / per_count];
                let mean = if count > 0.0 { square / count } else { 1.0 };
                out.extend((mean * n_chunks).to_le_bytes());
            }
        }
        number(&mut out, self.n_chunks as usize);
        let dataset = self.datasets.last().map_or("", String::as_str);
        number(&mut out, dataset.len());
        out.extend(dataset.as_bytes());
        out
    }
}

fn from_gguf(gguf: &Gguf) -> Result<Importance, String> {
    let metadata = gguf.metadata();
    let kind = metadata.opt_str("general.type").ok().flatten();
    if let Some(kind) = kind.filter(|kind| *kind != "imatrix") {
        return Err(format!(
            "a GGUF file of type {kind:?}, not an importance matrix"
        ));
    }
    let number = |key: &str| metadata.opt_u32(key).ok().flatten();
    let datasets = match metadata.get("imatrix.datasets") {
        Some(Value::Array(Array::Strings(names))) => names
            .iter()
            .map(|name| String::from_utf8_lossy(name).into_owned())
            .collect(),
        _ => Vec::new(),
    };
    let mut importance = Importance {
        of: BTreeMap::new(),
        datasets,
        n_chunks: number("imatrix.chunk_count").unwrap_or(0),
        chunk: number("imatrix.chunk_size").unwrap_or(CHUNK),
    };
    let floats = |tensor: &TensorInfo| -> Result<Vec<f32>, String> {
        if tensor.dtype != DType::F32 {
            return Err(format!("{} is {}, not F32", tensor.name, tensor.dtype));
        }
        let words = gguf.data(tensor).as_chunks::<4>().0;
        Ok(words.iter().map(|&word| f32::from_le_bytes(word)).collect())
    };
    for tensor in gguf.tensors() {
        let Some(name) = tensor.name.strip_suffix(".in_sum2") else {
            continue;
        };
        let counts = format!("{name}.counts");
        let counts = gguf
            .tensor(&counts)
            .ok_or_else(|| format!("{} is there, but no {counts}", tensor.name))?;
        let sums = Sums {
            squares: floats(tensor)?,
            counts: floats(counts)?,
        };
        importance.of.insert(name.to_owned(), sums);
    }
    Ok(importance)
}

/// The older format.
fn from_dat(bytes: &[u8]) -> Result<Importance, String> {
    let mut rest = bytes;
    let cut = || "it ends in the middle, or is no importance matrix".to_owned();
    let take = |rest: &mut &[u8], n: usize| -> Result<Vec<u8>, String> {
        let (taken, after) = rest.split_at_checked(n).ok_or_else(cut)?;
        let taken = taken.to_vec();
        *rest = after;
        Ok(taken)
    };
    let number = |rest: &mut &[u8]| -> Result<usize, String> {
        let bytes = take(rest, 4)?;
        let n = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        usize::try_from(n).map_err(|_| format!("a count of {n}: no importance matrix"))
    };
    let mut importance = Importance {
        chunk: CHUNK,
        ..Importance::default()
    };
    let n_entries = number(&mut rest)?;
    for _ in 0..n_entries {
        let length = number(&mut rest)?;
        if length > MAX_NAME {
            return Err(format!("a name of {length} bytes: no importance matrix"));
        }
        let name = String::from_utf8(take(&mut rest, length)?)
            .map_err(|_| "a name that is no text: no importance matrix".to_owned())?;
        let n_chunks = number(&mut rest)?;
        let n = number(&mut rest)?;
        let values = take(&mut rest, n.checked_mul(4).ok_or_else(cut)?)?;
        // Means times the number of chunks, as sums over the chunks' tokens.
        let tokens = CHUNK as f32;
        let squares = values.as_chunks::<4>().0.iter();
        let sums = Sums {
            squares: squares
                .map(|&word| f32::from_le_bytes(word) * tokens)
                .collect(),
            counts: vec![n_chunks.max(1) as f32 * tokens],
        };
        importance.of.insert(name, sums);
    }
    // What follows is missing in the oldest files.
    if !rest.is_empty() {
        importance.n_chunks = number(&mut rest)? as u32;
        let length = number(&mut rest)?;
        let name = take(&mut rest, length)?;
        importance
            .datasets
            .push(String::from_utf8_lossy(&name).into_owned());
    }
    Ok(importance)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Importance {
        let sums = |squares: &[f32], counts: &[f32]| Sums {
            squares: squares.to_vec(),
            counts: counts.to_vec(),
        };
        Importance {
            of: BTreeMap::from([
                ("blk.0.attn_q.weight".into(), sums(&[4.0, 8.0], &[1024.0])),
                (
                    "blk.0.ffn_up_exps.weight".into(),
                    sums(&[3.0, 9.0, 0.0, 0.0], &[512.0, 0.0]),
                ),
            ]),
            datasets: vec!["a.txt".into()],
            n_chunks: 2,
            chunk: 512,
        }
    }

    #[test]
    fn gguf_files_return_what_was_written() {
        let path = std::env::temp_dir().join(format!("ruvllm-imatrix-{}.gguf", std::process::id()));
        example().write(&path, ImportanceFormat::Gguf).unwrap();
        let read = Importance::read(&path);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(read.unwrap(), example());
    }

    /// The bytes of llama.cpp's older format, written out by hand.
    #[test]
    fn older_files() {
        let mut expected = Vec::new();
        let mut put = |word: [u8; 4]| expected.extend(word);
        put(2i32.to_le_bytes());
        put(19i32.to_le_bytes());
        expected.extend(b"blk.0.attn_q.weight");
        for word in [2, 2] {
            expected.extend(i32::to_le_bytes(word));
        }
        for x in [2.0 * 4.0 / 1024.0, 2.0 * 8.0 / 1024.0] {
            expected.extend(f32::to_le_bytes(x));
        }
        expected.extend(24i32.to_le_bytes());
        expected.extend(b"blk.0.ffn_up_exps.weight");
        for word in [1, 4] {
            expected.extend(i32::to_le_bytes(word));
        }
        for x in [3.0 / 512.0, 9.0 / 512.0, 1.0, 1.0] {
            expected.extend(f32::to_le_bytes(x));
        }
        for word in [2, 5] {
            expected.extend(i32::to_le_bytes(word));
        }
        expected.extend(b"a.txt");
        assert_eq!(example().to_dat(), expected);

        let read = from_dat(&expected).unwrap();
        assert_eq!((read.n_chunks, &read.datasets), (2, &example().datasets));
        assert_eq!(
            read.of["blk.0.attn_q.weight"],
            example().of["blk.0.attn_q.weight"]
        );
        let experts = &read.of["blk.0.ffn_up_exps.weight"];
        assert_eq!(
            (&experts.squares[..2], &experts.counts[..]),
            (&[3.0, 9.0][..], &[512.0][..])
        );
        // Cut anywhere: an error, but where only what is optional is missing.
        let optional = expected.len() - 13;
        for n in 0..expected.len() {
            assert_eq!(from_dat(&expected[..n]).is_ok(), n == optional, "{n}");
        }
    }

    #[test]
    fn sums_add_up() {
        let mut twice = example();
        twice.add(&example()).unwrap();
        assert_eq!(twice.n_chunks, 4);
        assert_eq!(twice.of["blk.0.attn_q.weight"].squares, [8.0, 16.0]);
        assert_eq!(twice.of["blk.0.ffn_up_exps.weight"].counts, [1024.0, 0.0]);
        let mut other = example();
        other
            .of
            .get_mut("blk.0.attn_q.weight")
            .unwrap()
            .squares
            .push(1.0);
        assert!(matches!(
            twice.add(&other),
            Err(ImportanceError::Different { .. })
        ));
        twice.keep(&["exps".into()], &[]);
        assert_eq!(twice.of.len(), 1);
    }
}
