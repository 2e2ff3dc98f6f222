//! What the worker of the npm package calls. A model and its sessions live in the memory of one module; every failure
//! is an exception with a name and a message, and a panic leaves its message for [`last_panic`].

mod calls;
mod failure;
mod fields;
mod reader;
mod request;
#[cfg(target_feature = "atomics")]
mod threads;

use failure::Failure;
use js_sys::{Float32Array, Uint8Array};
use std::sync::Mutex;
use wasm_bindgen::prelude::*;

static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

/// Called when the module is loaded.
#[wasm_bindgen(start)]
pub fn start() {
    std::panic::set_hook(Box::new(|info| {
        if let Ok(mut last) = LAST_PANIC.lock() {
            *last = info.to_string();
        }
    }));
}

/// What made the module stop, after an exception that is not one of its own.
#[wasm_bindgen]
pub fn last_panic() -> String {
    LAST_PANIC
        .lock()
        .map(|last| last.clone())
        .unwrap_or_default()
}

/// A file on its way into memory.
#[wasm_bindgen]
pub struct FileBytes {
    bytes: Vec<u8>,
    len: usize,
}

#[wasm_bindgen]
impl FileBytes {
    /// Room for the `len` bytes of the file called `name`.
    ///
    /// # Errors
    /// `MemoryError` if there is no such room.
    #[wasm_bindgen(constructor)]
    pub fn new(name: &str, len: f64) -> Result<FileBytes, JsValue> {
        // An allocation has at most half of the addresses.
        let room = || {
            let len = (0.0..=f64::from(i32::MAX))
                .contains(&len)
                .then_some(len as usize)?;
            let mut bytes = Vec::new();
            bytes.try_reserve_exact(len).ok()?;
            Some(FileBytes { bytes, len })
        };
        room().ok_or_else(|| {
            Failure::new(
                "MemoryError",
                format!(
                    "{name} has {len} bytes, which do not fit the memory of a WebAssembly module: a file has at most \
                     {} there, and no more than the host has left; take a smaller model or quantisation",
                    i32::MAX
                ),
            )
            .into()
        })
    }

    /// Appends a part of the file.
    ///
    /// # Errors
    /// `FileError` if there are more bytes than the file has.
    pub fn append(&mut self, part: &Uint8Array) -> Result<(), JsValue> {
        let (from, n) = (self.bytes.len(), part.length() as usize);
        if n > self.len - from {
            return Err(Failure::new(
                "FileError",
                format!("the file has {} bytes, but more come", self.len),
            )
            .into());
        }
        self.bytes.resize(from + n, 0);
        part.copy_to(&mut self.bytes[from..]);
        Ok(())
    }

    /// Bytes that are there.
    #[wasm_bindgen(getter)]
    pub fn length(&self) -> f64 {
        self.bytes.len() as f64
    }
}

/// An open model.
#[wasm_bindgen]
pub struct Model(calls::Model);

#[wasm_bindgen]
impl Model {
    /// Opens the model whose whole file is in memory; `options` is a JSON object.
    ///
    /// # Errors
    /// `ModelError`, `OptionsError`.
    pub fn open(file: FileBytes, options: &str) -> Result<Model, JsValue> {
        Ok(Model(calls::Model::open(file.bytes, options)?))
    }

    /// What is known of the model, a JSON object.
    pub fn info(&self) -> String {
        self.0.info()
    }

    /// Tokens of a text, as those of a prompt.
    ///
    /// # Errors
    /// `ModelError` if the file has no tokenizer.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>, JsValue> {
        Ok(self.0.tokenize(text)?)
    }

    /// Text of tokens.
    ///
    /// # Errors
    /// `ModelError` if the file has no tokenizer, or there is no such token.
    pub fn detokenize(&self, tokens: &[u32]) -> Result<String, JsValue> {
        Ok(self.0.detokenize(tokens)?)
    }

    /// A vector for each text.
    ///
    /// # Errors
    /// `SessionError`.
    pub fn embed(&self, texts: Vec<String>) -> Result<Vec<Float32Array>, JsValue> {
        let vectors = self.0.embed(&texts)?;
        Ok(vectors.iter().map(|v| Float32Array::from(&v[..])).collect())
    }

    /// A session; `options` is a JSON object.
    ///
    /// # Errors
    /// `SessionError`, `OptionsError`.
    pub fn session(&self, options: &str) -> Result<Session, JsValue> {
        Ok(Session(self.0.session(options)?))
    }
}

/// A text under way.
#[wasm_bindgen]
pub struct Session(calls::Session);

#[wasm_bindgen]
impl Session {
    /// Begins to continue a prompt or a conversation: `request` is a JSON object.
    ///
    /// # Errors
    /// `OptionsError`, `ChatError`, `GrammarError`, `SessionError`.
    pub fn begin(&mut self, request: &str) -> Result<(), JsValue> {
        Ok(self.0.begin(request)?)
    }

    /// The next piece of text; empty while the prompt is computed and within a character; nothing at the end.
    ///
    /// # Errors
    /// `SessionError`.
    pub fn advance(&mut self) -> Result<Option<String>, JsValue> {
        Ok(self.0.advance()?)
    }

    /// How far the text is, a JSON object.
    pub fn status(&self) -> String {
        self.0.status()
    }

    /// Ends what was begun; the session keeps what was computed.
    pub fn end(&mut self) {
        self.0.end();
    }

    /// Everything the session holds, to be loaded into another of the same model.
    ///
    /// # Errors
    /// `SessionError`.
    pub fn save(&mut self) -> Result<Uint8Array, JsValue> {
        Ok(Uint8Array::from(&self.0.save()?[..]))
    }

    /// Replaces what the session holds.
    ///
    /// # Errors
    /// `SessionError` if the bytes are no session, or one of another model.
    pub fn load(&mut self, bytes: Vec<u8>) -> Result<(), JsValue> {
        Ok(self.0.load(bytes)?)
    }

    /// Empties the session.
    ///
    /// # Errors
    /// `SessionError` while text is generated.
    pub fn clear(&mut self) -> Result<(), JsValue> {
        Ok(self.0.clear()?)
    }

    /// Attaches the adapter of a file; returns the adapter's number.
    ///
    /// # Errors
    /// `AdapterError`.
    pub fn attach(&mut self, file: Vec<u8>, scale: f32) -> Result<u32, JsValue> {
        Ok(self.0.attach(file, scale)?)
    }

    /// Detaches an adapter.
    ///
    /// # Errors
    /// `AdapterError`.
    pub fn detach(&mut self, adapter: u32) -> Result<(), JsValue> {
        Ok(self.0.detach(adapter)?)
    }

    /// Reads a text, learning it; returns the losses, a JSON object.
    ///
    /// # Errors
    /// `SessionError`.
    pub fn learn(&mut self, text: &str) -> Result<String, JsValue> {
        Ok(self.0.learn(text)?)
    }
}
