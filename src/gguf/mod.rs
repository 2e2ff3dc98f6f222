//! TODO gguf
