//! Sessions as files: they go on with the same bits, or are refused by name.

use crate::common::{cases, skipped};
use crate::run::{OnLevel, Pass, engine, level};
use crate::tiny::{N_VOCAB, Tiny};
use proptest::prelude::*;
use ruvllm::KvType;
use ruvllm::Model;
use ruvllm::SessionOptions;
use ruvllm::arch::Arch;
use ruvllm::engine::CacheMode;
use ruvllm::gguf::GgufError;
use ruvllm::gguf::{Gguf, Value, Writer};
use ruvllm::kv::{KvPolicy, KvTiers};
use ruvllm::lora::Adapter;
use ruvllm::quant::DType;
use ruvllm::session::{KeptError, StateError};
use ruvllm::session::{KeptSessions, SessionName};
use ruvllm::{Sampler, SamplerOptions, Session, SessionError};
use std::path::PathBuf;
use std::sync::Arc;

fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n)
        .map(|i| ((i * 31 + seed * 7 + i * i % 11) % N_VOCAB) as u32)
        .collect()
}

fn options(policy: KvPolicy) -> SessionOptions {
    let KvPolicy { k, v, tiers, .. } = policy;
    SessionOptions {
        n_ctx: Some(1024),
        kv_type: k,
        kv_type_v: Some(v),
        kv_tiers: tiers,
        ..Default::default()
    }
}

fn session(model: &Model, options: &SessionOptions) -> Session {
    engine(model, 1).session_with(options).unwrap()
}

fn policies() -> [KvPolicy; 3] {
    let mixed = KvPolicy {
        k: KvType::Q8,
        v: KvType::Q4,
        tiers: None,
    };
    let tiered = KvPolicy {
        tiers: Some(KvTiers {
            recent: 64,
            middle: 192,
        }),
        ..KvPolicy::default()
    };
    [KvPolicy::default(), mixed, tiered]
}

/// A folder of its own that goes when the test is over.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder =
            std::env::temp_dir().join(format!("ruvllm-state-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }

    fn names(&self) -> Vec<String> {
        let names = std::fs::read_dir(&self.0)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap());
        names.collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// llama.cpp #25913: what was saved of windows came back without checkpoints, and all was computed
/// again. Here rewinds find them, too.
#[test]
fn a_loaded_session_goes_on_with_the_same_bits() {
    for tiny in Tiny::ALL {
        let model = tiny.model(DType::Q8_0);
        for policy in policies() {
            let name = format!("{tiny:?} {policy:?}");
            let mut saved = session(&model, &options(policy));
            saved.prefill(&tokens(300, 1)).unwrap();
            (0..50).for_each(|i| saved.decode(i % 7).unwrap());
            saved.prefill(&tokens(130, 2)).unwrap();
            let bytes = saved.state().to_bytes().unwrap();
            let mut loaded = session(&model, &options(policy));
            // In place of something else.
            loaded.prefill(&tokens(20, 9)).unwrap();
            loaded.cache().load_bytes(bytes.clone()).unwrap();
            assert_eq!(
                (loaded.tokens(), loaded.logits()),
                (saved.tokens(), saved.logits()),
                "{name}"
            );
            assert_eq!(
                loaded.state().memory().kv,
                saved.state().memory().kv,
                "{name}"
            );
            assert!(loaded.state().to_bytes().unwrap() == bytes, "{name}");
            for position in [480, 470, 449, 320, 64, 10] {
                let both = [&mut saved, &mut loaded].map(|session| {
                    session.rewind(position).unwrap();
                    (session.decoded(3), session.prefilled(&tokens(10, 3)))
                });
                assert_eq!(both[0], both[1], "{name} {position}");
            }
        }
    }
}

/// The last token of a generation waits to be computed; it does in the loaded session, too. Empty
/// sessions and unloaded ones can be saved.
#[test]
fn generations_go_on() {
    let model = Model::open(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/models/ruvllm-rust-6m-q8_0.gguf"
    ))
    .unwrap();
    let mut sampler = Sampler::new(SamplerOptions {
        temperature: 0.0,
        ..Default::default()
    })
    .unwrap();
    let mut saved = model.session().unwrap();
    let begun = saved
        .generate("Ownership is", &mut sampler)
        .unwrap()
        .max_tokens(8)
        .text()
        .unwrap();
    assert!(!begun.is_empty());
    let bytes = saved.state().to_bytes().unwrap();
    let mut loaded = model.session().unwrap();
    loaded.cache().load_bytes(bytes).unwrap();
    let more = |session: &mut Session, sampler: &mut Sampler| {
        session
            .generate(" and", sampler)
            .unwrap()
            .max_tokens(8)
            .text()
            .unwrap()
    };
    assert_eq!(
        more(&mut saved, &mut sampler),
        more(&mut loaded, &mut sampler)
    );
    saved.cache().unload();
    loaded
        .cache()
        .load_bytes(saved.state().to_bytes().unwrap())
        .unwrap();
    assert_eq!(
        (loaded.position(), loaded.state().memory().kv.total()),
        (saved.position(), 0)
    );
    assert_eq!(
        more(&mut saved, &mut sampler),
        more(&mut loaded, &mut sampler)
    );
    loaded
        .cache()
        .load_bytes(model.session().unwrap().state().to_bytes().unwrap())
        .unwrap();
    assert_eq!((loaded.position(), loaded.logits().len()), (0, 0));
}

#[test]
fn what_bits_depend_on_is_compared_by_name() {
    let model = Tiny::Llama.model(DType::Q8_0);
    let plain = options(KvPolicy::default());
    let mut saved = session(&model, &plain);
    saved.prefill(&tokens(40, 1)).unwrap();
    let bytes = saved.state().to_bytes().unwrap();
    let refused = |mut other: Session| match other.cache().load_bytes(bytes.clone()).unwrap_err() {
        StateError::Other {
            what,
            found,
            expected,
        } if found != expected && other.position() == 0 => what,
        e => panic!("{e}"),
    };
    assert_eq!(
        refused(session(&Tiny::Llama.model(DType::F32), &plain)),
        "model"
    );
    assert_eq!(
        refused(session(&Tiny::Qwen3Moe.model(DType::Q8_0), &plain)),
        "model"
    );
    let other_level = if level().name() == "scalar" {
        Arch::detect()
    } else {
        Arch::scalar()
    };
    if other_level.name() == level().name() {
        skipped("this CPU has one level");
    } else {
        assert_eq!(
            refused(session(&model.on(other_level), &plain)),
            "instruction-set level or device"
        );
    }
    for policy in policies().into_iter().skip(1).chain([KvType::F32.into()]) {
        assert_eq!(
            refused(session(&model, &options(policy))),
            "precision of keys and values"
        );
    }
    let exact = SessionOptions {
        exact: true,
        ..plain.clone()
    };
    assert_eq!(
        refused(session(&model, &exact)),
        "arithmetic of prompts (exact)"
    );
    let adapted = |seed| {
        let mut other = session(&model, &plain);
        let mut adapter = Adapter::zeros(&model, 2, seed, |_| true).unwrap();
        adapter.term_mut(0).unwrap().parts_mut().1[0] = 0.5;
        other.adapters().attach(Arc::new(adapter), 1.0).unwrap();
        other
    };
    assert_eq!(refused(adapted(1)), "set of adapters");
    // The same adapter, attached anew, is the same; another is not.
    let mut with = adapted(1);
    let logits = with.prefilled(&tokens(40, 1));
    let bytes_with = with.state().to_bytes().unwrap();
    let mut again = adapted(1);
    again.cache().load_bytes(bytes_with.clone()).unwrap();
    assert_eq!(again.logits(), logits);
    assert_eq!(again.decoded(3), with.decoded(3));
    let error = adapted(2).cache().load_bytes(bytes_with).unwrap_err();
    assert!(
        matches!(
            error,
            StateError::Other {
                what: "set of adapters",
                ..
            }
        ),
        "{error}"
    );

    let mut small = session(
        &model,
        &SessionOptions {
            n_ctx: Some(39),
            ..plain.clone()
        },
    );
    let error = small.cache().load_bytes(bytes.clone()).unwrap_err();
    assert!(
        matches!(
            error,
            StateError::Session(SessionError::ContextFull {
                n_ctx: 39,
                n_past: 0,
                n_new: 40
            })
        ),
        "{error}"
    );
    // How the session is used does not matter.
    let other = SessionOptions {
        n_ctx: Some(40),
        n_batch: 3,
        prefix: CacheMode::On.into(),
        ..plain
    };
    session(&model, &other).cache().load_bytes(bytes).unwrap();
    let error = session(&model, &other)
        .cache()
        .load_bytes(Tiny::Llama.parts(DType::F32).bytes())
        .unwrap_err();
    assert!(
        matches!(&error, StateError::NotASession { found } if found.is_empty()),
        "{error}"
    );
}

#[test]
fn files_are_replaced_whole_or_not_at_all() {
    let folder = Folder::new("files");
    let path = folder.0.join("a.session");
    let model = Tiny::Llama.model(DType::Q8_0);
    let plain = options(KvPolicy::default());
    let mut saved = session(&model, &plain);
    saved.prefill(&tokens(40, 1)).unwrap();
    saved.state().save(&path).unwrap();
    saved.prefill(&tokens(40, 2)).unwrap();
    saved.state().save(&path).unwrap();
    assert_eq!(folder.names(), ["a.session"]);
    #[cfg(unix)]
    {
        let mode = std::os::unix::fs::PermissionsExt::mode(
            &std::fs::metadata(&path).unwrap().permissions(),
        );
        assert_eq!(mode & 0o777, 0o600);
    }
    let mut loaded = session(&model, &plain);
    loaded.cache().load(&path).unwrap();
    assert_eq!(loaded.tokens(), saved.tokens());
    assert_eq!(loaded.decoded(1), saved.decoded(1));
    let position = loaded.position();
    for missing in [
        folder.0.join("b.session"),
        folder.0.join("no/folder"),
        folder.0.clone(),
    ] {
        let error = loaded.cache().load(&missing).unwrap_err();
        assert!(matches!(&error, StateError::Gguf(_)), "{error}");
    }
    for wrong in [folder.0.join("no/folder"), folder.0.clone()] {
        let error = loaded.state().save(&wrong).unwrap_err();
        assert!(
            matches!(&error, StateError::Gguf(GgufError::Io { .. })),
            "{error}"
        );
    }
    assert_eq!(
        (loaded.position(), folder.names()),
        (position, vec!["a.session".to_owned()])
    );
    // Not as root, who may write everywhere.
    let mut permissions = std::fs::metadata(&folder.0).unwrap().permissions();
    let before = permissions.clone();
    permissions.set_readonly(true);
    std::fs::set_permissions(&folder.0, permissions).unwrap();
    let probe = std::fs::write(folder.0.join("probe"), "");
    let outcome = loaded.state().save(folder.0.join("c.session"));
    std::fs::set_permissions(&folder.0, before).unwrap();
    match probe {
        Err(_) => assert!(matches!(
            outcome,
            Err(StateError::Gguf(GgufError::Io { .. }))
        )),
        Ok(()) => skipped("this user may write to read-only folders"),
    }
}

#[test]
fn every_truncation_and_flipped_bits_are_noticed() {
    let model = Tiny::Gemma2.model(DType::Q8_0);
    let mut saved = session(&model, &options(KvType::Q4.into()));
    saved.prefill(&tokens(70, 1)).unwrap();
    let bytes = saved.state().to_bytes().unwrap();
    let mut loaded = session(&model, &options(KvType::Q4.into()));
    loaded.prefill(&tokens(5, 1)).unwrap();
    for n in (0..bytes.len()).rev() {
        // The padding behind the last tensor may be missing.
        let Err(error) = loaded.cache().load_bytes(bytes[..n].to_vec()) else {
            assert!(
                loaded.state().to_bytes().unwrap() == bytes && n + 32 > bytes.len(),
                "{n} bytes"
            );
            continue;
        };
        assert!(!error.to_string().is_empty());
    }
    loaded.clear();
    let header = bytes.len().min(4096);
    let bits = (0..8 * header).chain((8 * header..8 * bytes.len()).step_by(61));
    let mut n_harmless = 0;
    for bit in bits {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        // Of padding and the format's version some bits do not matter.
        if loaded.cache().load_bytes(flipped).is_ok() {
            assert!(loaded.state().to_bytes().unwrap() == bytes, "bit {bit}");
            n_harmless += 1;
            loaded.clear();
        }
        assert_eq!(loaded.position(), 0);
    }
    eprintln!("{n_harmless} flips changed nothing");
    assert!(
        n_harmless < 8 * 32 * 16,
        "{n_harmless} flips in at most 16 gaps between tensors"
    );
}

/// The hash as `session.checksum` has it, written anew: of names and bytes, by words.
fn checksum(tensors: &[(String, DType, Vec<u8>)]) -> u64 {
    let step = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x100_0000_01b3).rotate_left(23);
    let mut hash = 0xcbf2_9ce4_8422_2325;
    for bytes in tensors
        .iter()
        .flat_map(|(name, _, bytes)| [name.as_bytes(), bytes])
    {
        for word in bytes.chunks(8).filter(|word| word.len() == 8) {
            hash = step(hash, u64::from_le_bytes(word.try_into().unwrap()));
        }
        let mut last = [0; 8];
        last[..bytes.len() % 8].copy_from_slice(&bytes[bytes.len() / 8 * 8..]);
        hash = step(step(hash, u64::from_le_bytes(last)), bytes.len() as u64);
    }
    hash
}

/// The file with other tensors, under the checksum of these.
fn forged(gguf: &Gguf, change: impl FnOnce(&mut Vec<(String, DType, Vec<u8>)>)) -> Vec<u8> {
    let tensor = |t: &ruvllm::gguf::TensorInfo| (t.name.clone(), t.dtype, gguf.data(t).to_vec());
    let mut tensors: Vec<_> = gguf.tensors().iter().map(tensor).collect();
    change(&mut tensors);
    tensors.retain(|(_, _, bytes)| !bytes.is_empty());
    let mut writer = Writer::new();
    for (key, value) in gguf.metadata().iter() {
        let value = if key == "session.checksum" {
            Value::U64(checksum(&tensors))
        } else {
            value.clone()
        };
        writer.metadata(key, value);
    }
    for (name, dtype, bytes) in tensors {
        let width = if dtype == DType::I8 { 1 } else { 4 };
        writer.tensor(name, &[bytes.len() as u64 / width], dtype, bytes);
    }
    writer.to_bytes().unwrap()
}

proptest! {
    #![proptest_config(cases(300))]

    /// Files with a sound checksum whose numbers make no sense: refused, or a session that can be used.
    #[test]
    fn forged_numbers_do_no_harm(
        kind in 0usize..3,
        changes in prop::collection::vec((any::<u16>(), any::<u16>(), 0u32..8, any::<u32>()), 1..4),
    ) {
        let model = [Tiny::Llama, Tiny::Gemma2, Tiny::Llama][kind].model(DType::F32);
        let options = options(policies()[kind]);
        let mut saved = session(&model, &options);
        saved.prefill(&tokens(150, 1)).unwrap();
        saved.prefill(&tokens(120, 2)).unwrap();
        let gguf = Gguf::from_bytes(saved.state().to_bytes().unwrap()).unwrap();
        let bytes = forged(&gguf, |tensors| {
            for (which, at, how, value) in changes {
                let small: Vec<usize> = (0..tensors.len()).filter(|&i| tensors[i].1 != DType::F32).collect();
                let i = small[which as usize % small.len().min(8)];
                let data = &mut tensors[i].2;
                let word = (at as usize % (data.len() / 4).max(1)) * 4;
                match how {
                    0 => data.truncate(word),
                    1 => data.extend_from_slice(&value.to_le_bytes()),
                    2 if data.len() >= 4 => drop(data.drain(word..word + 4)),
                    3 if data.len() >= 4 => data[word..word + 4].copy_from_slice(&value.to_le_bytes()),
                    _ if data.len() >= 4 => data[word..word + 4].copy_from_slice(&(value % 8).to_le_bytes()),
                    _ => {}
                }
            }
        });
        let mut loaded = session(&model, &options);
        if loaded.cache().load_bytes(bytes).is_ok() {
            let n = loaded.position();
            for position in [n, n / 2, 0] {
                loaded.rewind(position).unwrap();
                if position < loaded.sequence().n_ctx() {
                    loaded.decode(1).unwrap();
                }
            }
        } else {
            prop_assert_eq!(loaded.position(), 0);
        }
    }
}

/// Sessions are listed, resumed, renamed and deleted by name; one that somebody has is left alone.
#[test]
fn sessions_are_kept_by_name() {
    let (model, folder) = (
        Tiny::Llama.model(DType::F32).on(Arch::scalar()),
        Folder::new("kept"),
    );
    let kept = KeptSessions::new(folder.0.join("sessions"));
    let name = |name: &str| name.parse::<SessionName>().unwrap();
    assert!(kept.names().unwrap().is_empty());
    let options = options(KvPolicy::default());
    let mut first = session(&model, &options);
    let trip = kept.open(&name("trip")).unwrap();
    assert!(!trip.load(&mut first).unwrap());
    first.prefill(&tokens(100, 1)).unwrap();
    trip.save(&first).unwrap();
    kept.open(&name("a-2_B")).unwrap();
    std::fs::create_dir(folder.0.join("sessions/not one")).unwrap();
    assert_eq!(kept.names().unwrap(), [name("a-2_B"), name("trip")]);

    assert!(matches!(
        kept.open(&name("trip")),
        Err(KeptError::InUse { .. })
    ));
    assert!(matches!(
        kept.rename(&name("trip"), &name("paris")),
        Err(KeptError::InUse { .. })
    ));
    assert!(matches!(
        kept.delete(&name("trip")),
        Err(KeptError::InUse { .. })
    ));
    drop(trip);
    assert!(matches!(
        kept.rename(&name("trip"), &name("a-2_B")),
        Err(KeptError::Exists { .. })
    ));
    assert!(matches!(
        kept.rename(&name("rome"), &name("paris")),
        Err(KeptError::Missing { .. })
    ));
    kept.rename(&name("trip"), &name("paris")).unwrap();

    let paris = kept.open(&name("paris")).unwrap();
    let mut second = session(&model, &options);
    assert!(paris.load(&mut second).unwrap());
    assert_eq!(second.tokens(), first.tokens());
    assert_eq!(second.decoded(5), first.decoded(5));
    paris.forget().unwrap();
    assert!(!paris.load(&mut second).unwrap());
    drop(paris);
    kept.delete(&name("paris")).unwrap();
    assert!(matches!(
        kept.delete(&name("paris")),
        Err(KeptError::Missing { .. })
    ));
    assert_eq!(kept.names().unwrap(), [name("a-2_B")]);
    for wrong in ["", ".", "..", "a/b", "a b", "\u{e9}", &"x".repeat(65)[..]] {
        assert!(wrong.parse::<SessionName>().is_err(), "{wrong:?}");
    }
}
