//! Instances of the shared source for a level.

/// Instances of kernels of `$body` for one level: `$zero` must be safe under `$features`.
macro_rules! instantiate {
    ($features:literal, $zero:expr, $body:ident: $($name:ident($($arg:ident: $type:ty),*) $(-> $ret:ty)?;)*) => {$(
        #[target_feature(enable = $features)]
        pub(super) fn $name($($arg: $type),*) $(-> $ret)? {
            $crate::arch::generic::$body::$name($zero, $($arg),*)
        }
    )*};
}

/// The instances of the kernels of `declared.rs` for one level, and their table; as
/// [`instantiate`].
macro_rules! slice_kernels {
    ([$features:literal, $zero:expr] $(
        $(#[$doc:meta])*
        fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? { $($checks:tt)* }
    )*) => {
        $(
            #[target_feature(enable = $features)]
            fn $name($($arg: $type),*) $(-> $ret)? {
                $crate::arch::generic::slices::$name($zero, $($arg),*)
            }
        )*

        pub(super) const TABLE: $crate::arch::table::SliceKernels =
            $crate::arch::table::SliceKernels { $($name,)* };
    };
}

/// The shared kernels of attention, for a level whose `load_kv` is in scope.
macro_rules! attention_kernels {
    ($features:literal, $zero:expr) => {
        #[target_feature(enable = $features)]
        pub(in crate::arch) fn attention_f32(
            to: &mut $crate::arch::attention::AttnPartial<'_>,
            q: &[f32],
            span: $crate::arch::attention::KvSpan<'_, f32>,
            ranges: &[(u32, u32)],
            p: &$crate::arch::attention::AttnParams,
        ) {
            $crate::arch::generic::attention::attention($zero, to, q, span, ranges, p);
        }

        #[target_feature(enable = $features)]
        pub(in crate::arch) fn attention_f16(
            to: &mut $crate::arch::attention::AttnPartial<'_>,
            q: &[f32],
            span: $crate::arch::attention::KvSpan<'_, half::f16>,
            ranges: &[(u32, u32)],
            p: &$crate::arch::attention::AttnParams,
        ) {
            $crate::arch::generic::attention::attention($zero, to, q, span, ranges, p);
        }

        #[target_feature(enable = $features)]
        pub(in crate::arch) fn attention_stored(
            to: &mut $crate::arch::attention::AttnPartial<'_>,
            q: &[f32],
            stored: $crate::arch::kv::KvStored<'_>,
            ranges: &[(u32, u32)],
            p: &$crate::arch::attention::AttnParams,
        ) {
            let mut tiles = [const { $crate::arch::generic::kv_blocks::Tile::uninit() }; 2];
            // SAFETY: `load_kv` is this level's.
            let blocks = unsafe { $crate::arch::generic::kv_blocks::Widened::new(stored, &mut tiles, load_kv, p) };
            $crate::arch::generic::attention::attention($zero, to, q, blocks, ranges, p);
        }

        $crate::arch::generic::instances::instantiate! { $features, $zero, attention:
            attention_merge(to: &mut $crate::arch::attention::AttnPartial<'_>, from: &$crate::arch::attention::AttnPartial<'_>,
                head_dim_v: usize);
            attention_finish(to: &mut $crate::arch::attention::AttnPartial<'_>, head_dim_v: usize);
        }
        $crate::arch::generic::instances::instantiate! { $features, $zero, attention_backward:
            attention_queries(dq: &mut [f32], lse: &mut [f32], q: &[f32], dout: &[f32], delta: &[f32], k: &[f32],
                v: &[f32], ranges: &[(u32, u32)], p: &$crate::arch::attention::AttnParams);
            attention_keys(dk: &mut [f32], dv: &mut [f32], k: &[f32], v: &[f32], q: &[f32], dout: &[f32],
                lse: &[f32], delta: &[f32], ranges: &[(u32, u32)], p: &$crate::arch::attention::AttnParams);
        }
    };
}
pub(in crate::arch) use {attention_kernels, instantiate, slice_kernels};
