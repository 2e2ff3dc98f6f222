//! TODO lora
