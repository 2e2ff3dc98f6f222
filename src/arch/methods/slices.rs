//! The kernels of `declared.rs`.

use crate::arch::declared::for_each_slice_kernel;
use crate::arch::level::Arch;

/// Makes the methods.
macro_rules! methods {
    ([] $(
        $(#[$doc:meta])*
        fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)? {
            $(skip $skip:expr;)?
            $(check $check:expr;)*
        }
    )*) => {
        impl Arch {$(
            $(#[$doc])*
            pub fn $name(self, $($arg: $type),*) $(-> $ret)? {
                $(if $skip { return; })?
                $(check($check, stringify!($name), stringify!($check));)*
                // SAFETY: `self` proves the CPU features; lengths were checked above.
                unsafe { (self.0.slices.$name)($($arg),*) }
            }
        )*}
    };
}
for_each_slice_kernel!(methods []);

/// Panics unless a condition of a kernel holds.
#[inline]
#[track_caller]
fn check(holds: bool, kernel: &str, condition: &str) {
    assert!(holds, "{kernel}: {condition}");
}

/// Whether `n` rows of `width` values, which lie `stride` values apart, are at most `len` values.
fn has_rows(len: usize, stride: usize, n: usize, width: usize) -> bool {
    let end = stride
        .checked_mul(n - 1)
        .and_then(|last| last.checked_add(width));
    width <= stride && end.is_some_and(|end| end <= len)
}
