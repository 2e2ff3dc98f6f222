//! stub
#![allow(missing_docs)]
use crate::error::TokenizerError;
use crate::gguf::Metadata;
#[derive(Debug)]
pub struct Tokenizer;
impl Tokenizer {
    pub fn from_metadata(_m: &Metadata) -> Result<Tokenizer, TokenizerError> {
        Err(TokenizerError::Missing)
    }
    pub fn n_vocab(&self) -> usize {
        0
    }
    pub fn is_eog(&self, _: u32) -> bool {
        false
    }
    pub fn encode(&self, _: &str, _: bool, _: bool) -> Vec<u32> {
        vec![]
    }
}
#[derive(Debug)]
pub struct TextStream<'a>(&'a Tokenizer, String);
impl<'a> TextStream<'a> {
    pub fn new(t: &'a Tokenizer, _s: bool) -> Self {
        TextStream(t, String::new())
    }
    pub fn push(&mut self, _t: u32) -> Result<&str, TokenizerError> {
        Ok("")
    }
    pub fn finish(&mut self) -> &str {
        &self.1
    }
}
