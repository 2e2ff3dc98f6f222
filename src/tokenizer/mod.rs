//! TODO tokenizer
