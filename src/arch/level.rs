//! Instruction-set levels of this build, and detection of those that the CPU has.

#[cfg(target_arch = "aarch64")]
use super::aarch64;
use super::scalar;
use super::table::Kernels;
#[cfg(target_feature = "simd128")]
use super::wasm32;
#[cfg(target_arch = "x86_64")]
use super::x86;

/// Levels this build has, best first.
pub(super) static LEVELS: &[&Kernels] = &[
    #[cfg(target_arch = "x86_64")]
    &x86::amx::KERNELS,
    #[cfg(target_arch = "x86_64")]
    &x86::avx512_bf16::KERNELS,
    #[cfg(target_arch = "x86_64")]
    &x86::avx512::KERNELS,
    #[cfg(target_arch = "x86_64")]
    &x86::avx_vnni::KERNELS,
    #[cfg(target_arch = "x86_64")]
    &x86::avx2::KERNELS,
    #[cfg(target_arch = "aarch64")]
    &aarch64::i8mm::KERNELS,
    #[cfg(target_arch = "aarch64")]
    &aarch64::dotprod::KERNELS,
    #[cfg(target_arch = "aarch64")]
    &aarch64::neon::KERNELS,
    #[cfg(target_feature = "simd128")]
    &wasm32::simd128::KERNELS,
    &scalar::KERNELS,
];

/// The kernels of one instruction-set level that this CPU has.
#[derive(Clone, Copy)]
pub struct Arch(pub(super) &'static Kernels);

impl std::fmt::Debug for Arch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Arch({})", self.0.name)
    }
}

impl Arch {
    /// The best level this CPU has.
    pub fn detect() -> Arch {
        Arch::available().next().unwrap_or(Arch::scalar())
    }

    /// The level called `name`, if this CPU has it.
    ///
    /// # Errors
    /// If it does not; lists the levels it has.
    pub fn named(name: &str) -> Result<Arch, ArchError> {
        Arch::available()
            .find(|a| a.name() == name)
            .ok_or_else(|| ArchError {
                name: name.to_owned(),
                available: Arch::available().map(Arch::name).collect(),
                known: LEVELS.iter().any(|k| k.name == name),
            })
    }

    /// Every level this CPU has, best first.
    pub fn available() -> impl Iterator<Item = Arch> {
        LEVELS.iter().copied().filter(|k| (k.supported)()).map(Arch)
    }

    /// The portable level.
    pub fn scalar() -> Arch {
        Arch(&scalar::KERNELS)
    }

    /// The level's name: `avx2`, `neon`, …
    pub fn name(self) -> &'static str {
        self.0.name
    }
}

/// A level that cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "instruction-set level {name:?} is {}; this CPU has: {}",
    if *.known { "not supported by this CPU" } else { "not known" },
    .available.join(", ")
)]
pub struct ArchError {
    /// Name of the requested level.
    pub name: String,
    /// Levels that can be used, best first.
    pub available: Vec<&'static str>,
    /// Whether this build knows the level at all.
    pub known: bool,
}
