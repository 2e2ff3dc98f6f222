//! The tile instructions in software, for CPUs without them: what traps as an illegal instruction
//! is decoded and executed here, after the pseudocode of Intel's "Software Developer's Manual",
//! volume 2. So tests run this level's real machine code, some hundred times slower.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

const SIGILL: c_int = 4;
const SA_SIGINFO: c_int = 4;

/// `struct sigaction` of Linux on x86-64, as the C library has it.
#[repr(C)]
struct SigAction {
    handler: usize,
    mask: [u64; 16],
    flags: c_int,
    restorer: usize,
}

unsafe extern "C" {
    fn sigaction(signal: c_int, new: *const SigAction, old: *mut SigAction) -> c_int;
}

/// `ucontext_t`, up to the registers.
#[repr(C)]
struct Context {
    flags: u64,
    link: *mut c_void,
    stack: [u64; 3],
    /// r8 to r15, rdi, rsi, rbp, rbx, rdx, rax, rcx, rsp, rip.
    registers: [u64; 17],
}

const RIP: usize = 16;
/// Index in [`Context::registers`] for each register number of the instruction set.
const NUMBERED: [usize; 16] = [13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7];

const ROWS: usize = 16;
const ROW_BYTES: usize = 64;

type Tile = [[u8; ROW_BYTES]; ROWS];

thread_local! {
    static TILES: UnsafeCell<[Tile; 8]> = const { UnsafeCell::new([[[0; ROW_BYTES]; ROWS]; 8]) };
}

/// Installs the handler of illegal instructions in this process; returns whether that worked.
pub(super) fn install() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        let action = SigAction {
            handler: handle as *const () as usize,
            mask: [0; 16],
            flags: SA_SIGINFO,
            restorer: 0,
        };
        // SAFETY: a valid action; `handle` has the signature that SA_SIGINFO asks for.
        unsafe { sigaction(SIGILL, &action, std::ptr::null_mut()) == 0 }
    })
}

/// A decoded instruction; tiles are given by number.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Instruction {
    LoadConfig { from: u64 },
    Release,
    Zero(usize),
    Load { tile: usize, from: u64, stride: u64 },
    Store { tile: usize, to: u64, stride: u64 },
    DotBf16 { c: usize, a: usize, b: usize },
}

/// The instruction at `code` and its length, if it is one of those that [`super::tiles`] uses:
/// three bytes of VEX, an opcode of the map 0F38, ModRM, perhaps SIB, perhaps a displacement of one
/// byte.
fn decode(code: &[u8; 7], registers: &[u64; 17]) -> Option<(Instruction, u64)> {
    let [0xc4, rxb, wvvvv, opcode, modrm, sib, _] = *code else {
        return None;
    };
    let (prefix, map) = (wvvvv & 3, rxb & 0x1f);
    if map != 2 {
        return None;
    }
    // VEX holds the fourth bits of register numbers inverted.
    let value = |bit: u8, low: u8| {
        registers[NUMBERED[(low & 7 | if rxb & bit == 0 { 8 } else { 0 }) as usize]]
    };
    let (mode, reg, rm) = (modrm >> 6, modrm >> 3 & 7, modrm & 7);
    let tile = reg as usize;
    // Address, index register, length of the instruction.
    let memory = || {
        let has_sib = rm == 4;
        let base = if has_sib { sib } else { rm };
        let index = match has_sib && (sib >> 3 & 7 != 4 || rxb & 0x40 == 0) {
            true => value(0x40, sib >> 3),
            false => 0,
        };
        let length = 5 + u64::from(has_sib) + u64::from(mode);
        let displacement = if mode == 1 {
            code[length as usize - 1] as i8
        } else {
            0
        };
        // No scaled index; without a displacement, base 5 would mean an absolute address.
        let known = mode < 2 && (!has_sib || sib >> 6 == 0) && (mode == 1 || base & 7 != 5);
        known.then(|| {
            (
                value(0x20, base).wrapping_add_signed(displacement.into()),
                index,
                length,
            )
        })
    };
    match (opcode, prefix) {
        (0x49, 0) if mode == 3 => Some((Instruction::Release, 5)),
        (0x49, 0) => memory()
            .map(|(from, index, length)| (Instruction::LoadConfig { from: from + index }, length)),
        (0x49, 3) if mode == 3 => Some((Instruction::Zero(tile), 5)),
        (0x4b, 1 | 3) => memory()
            .map(|(from, stride, length)| (Instruction::Load { tile, from, stride }, length)),
        (0x4b, 2) => {
            memory().map(|(to, stride, length)| (Instruction::Store { tile, to, stride }, length))
        }
        (0x5c, 2) if mode == 3 => {
            let b = (!wvvvv >> 3 & 7) as usize;
            Some((
                Instruction::DotBf16 {
                    c: tile,
                    a: rm as usize,
                    b,
                },
                5,
            ))
        }
        _ => None,
    }
}

extern "C" fn handle(_signal: c_int, _info: *mut c_void, context: *mut c_void) {
    // SAFETY: the kernel hands over a context of this layout, which only this handler uses now.
    let context = unsafe { &mut *context.cast::<Context>() };
    // SAFETY: the address is that of code; only bytes after an instruction at the very end of a
    // mapping might not exist, and functions end with a return.
    let code = unsafe { (context.registers[RIP] as *const [u8; 7]).read_unaligned() };
    let Some((instruction, length)) = decode(&code, &context.registers) else {
        // Not ours: with the default action the instruction traps again and ends the process.
        let default = SigAction {
            handler: 0,
            mask: [0; 16],
            flags: 0,
            restorer: 0,
        };
        // SAFETY: a valid action.
        unsafe { sigaction(SIGILL, &default, std::ptr::null_mut()) };
        return;
    };
    context.registers[RIP] += length;
    TILES.with(|tiles| {
        // SAFETY: only this handler uses the tiles of its thread, and it executes no tile
        // instruction.
        let tiles = unsafe { &mut *tiles.get() };
        match instruction {
            Instruction::LoadConfig { .. } | Instruction::Release => {
                *tiles = [[[0; ROW_BYTES]; ROWS]; 8]
            }
            Instruction::Zero(tile) => tiles[tile] = [[0; ROW_BYTES]; ROWS],
            Instruction::Load { tile, from, stride } => {
                for (i, row) in tiles[tile].iter_mut().enumerate() {
                    let from =
                        from.wrapping_add(stride.wrapping_mul(i as u64)) as *const [u8; ROW_BYTES];
                    // SAFETY: the instruction reads there.
                    *row = unsafe { from.read_unaligned() };
                }
            }
            Instruction::Store { tile, to, stride } => {
                for (i, row) in tiles[tile].iter().enumerate() {
                    let to = to.wrapping_add(stride.wrapping_mul(i as u64)) as *mut [u8; ROW_BYTES];
                    // SAFETY: the instruction writes there.
                    unsafe { to.write_unaligned(*row) };
                }
            }
            Instruction::DotBf16 { c, a, b } => {
                let (a, b) = (tiles[a], tiles[b]);
                for (c, a) in tiles[c].iter_mut().zip(&a) {
                    *c = dot_row(*c, a, &b);
                }
            }
        }
    });
}

/// One row of sums: products of even `k` and of odd `k` are summed separately first. Denormals
/// count as zero, both as operands and as results.
fn dot_row(c: [u8; ROW_BYTES], a: &[u8; ROW_BYTES], b: &Tile) -> [u8; ROW_BYTES] {
    let mut sums = [[0.0; 16]; 2];
    let a: [[u16; 2]; 16] = bytemuck::cast(*a);
    for (a, b) in a.iter().zip(b) {
        let b: [[u16; 2]; 16] = bytemuck::cast(*b);
        for i in [0, 1] {
            let a = widen(a[i]);
            for (sum, b) in sums[i].iter_mut().zip(&b) {
                *sum = flush(a.mul_add(widen(b[i]), *sum));
            }
        }
    }
    let mut c: [f32; 16] = bytemuck::cast(c);
    let [even, odd] = sums;
    for ((c, even), odd) in c.iter_mut().zip(even).zip(odd) {
        *c = flush(flush(*c) + flush(even + odd));
    }
    bytemuck::cast(c)
}

fn widen(x: u16) -> f32 {
    flush(f32::from_bits(u32::from(x) << 16))
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0 } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodings produced by the assembler of binutils.
    #[test]
    fn decodes() {
        let mut registers = [0; 17];
        for (number, &place) in NUMBERED.iter().enumerate() {
            registers[place] = number as u64;
        }
        let cases: [(&[u8], Instruction); 10] = [
            (
                &[0xc4, 0xe2, 0x78, 0x49, 0x07],
                Instruction::LoadConfig { from: 7 },
            ), // ldtilecfg [rdi]
            (
                &[0xc4, 0xc2, 0x78, 0x49, 0x04, 0x24],
                Instruction::LoadConfig { from: 12 },
            ), // ldtilecfg [r12]
            (
                &[0xc4, 0xc2, 0x78, 0x49, 0x45, 0x00],
                Instruction::LoadConfig { from: 13 },
            ), // ldtilecfg [r13]
            (&[0xc4, 0xe2, 0x78, 0x49, 0xc0], Instruction::Release), // tilerelease
            (&[0xc4, 0xe2, 0x7b, 0x49, 0xd8], Instruction::Zero(3)), // tilezero tmm3
            // tileloadd tmm6, [rax + r9]
            (
                &[0xc4, 0xa2, 0x7b, 0x4b, 0x34, 0x08],
                Instruction::Load {
                    tile: 6,
                    from: 0,
                    stride: 9,
                },
            ),
            // tileloadd tmm4, [r13 + r12]
            (
                &[0xc4, 0x82, 0x7b, 0x4b, 0x64, 0x25, 0x00],
                Instruction::Load {
                    tile: 4,
                    from: 13,
                    stride: 12,
                },
            ),
            // tileloaddt1 tmm6, [rax + r9]
            (
                &[0xc4, 0xa2, 0x79, 0x4b, 0x34, 0x08],
                Instruction::Load {
                    tile: 6,
                    from: 0,
                    stride: 9,
                },
            ),
            // tilestored [r8 + rdx], tmm1
            (
                &[0xc4, 0xc2, 0x7a, 0x4b, 0x0c, 0x10],
                Instruction::Store {
                    tile: 1,
                    to: 8,
                    stride: 2,
                },
            ),
            // tdpbf16ps tmm2, tmm5, tmm6
            (
                &[0xc4, 0xe2, 0x4a, 0x5c, 0xd5],
                Instruction::DotBf16 { c: 2, a: 5, b: 6 },
            ),
        ];
        for (bytes, instruction) in cases {
            let mut code = [0x90; 7];
            code[..bytes.len()].copy_from_slice(bytes);
            assert_eq!(
                decode(&code, &registers),
                Some((instruction, bytes.len() as u64)),
                "{code:x?}"
            );
        }
        assert_eq!(decode(&[0x0f, 0x0b, 0, 0, 0, 0, 0], &registers), None); // ud2
    }

    /// Either of the two products would be lost if it were added to 2²⁴ alone; their sum is not.
    #[test]
    fn sums_even_and_odd_by_themselves() {
        let one = [0x3f80u16; 2];
        let mut a = [[0u16; 2]; 16];
        a[7] = one;
        let b: Tile = bytemuck::cast([[one; 16]; 16]);
        let sums = dot_row(bytemuck::cast([16777216f32; 16]), &bytemuck::cast(a), &b);
        assert_eq!(bytemuck::cast::<_, [f32; 16]>(sums), [16777218.0; 16]);
    }
}
