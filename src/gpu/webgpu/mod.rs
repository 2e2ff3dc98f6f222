//! Passes on any GPU, through `wgpu`: Vulkan, Direct3D 12 or Metal. Shaders are in
//! `src/wgsl_shaders`, which [`shaders`] composes to a module per kernel instance; [`device`] runs
//! them.

pub mod device;
mod grid;
pub mod shaders;
mod stage;

pub use device::{AdapterInfo, Device, Options, adapters};
pub use stage::DeviceStage;
