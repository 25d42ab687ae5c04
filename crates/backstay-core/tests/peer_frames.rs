//! Messages between servers: what is laid out is read back the same, and nothing else is read.

// What fails in a helper is a failed test.
#![allow(clippy::unwrap_used, clippy::float_cmp)]

use std::sync::Arc;

use backstay_core::compensation::Compensation;
use backstay_core::engine::SlotMemory;
use backstay_core::error::Refusal;
use backstay_core::hash::SlotSpace;
use backstay_core::life::Thresholds;
use backstay_core::optimizer::{Optimizer, Sgd};
use backstay_core::replication::message::{Message, Refuse, SlotOrder};
use backstay_core::stream::{StreamId, StreamWindow, TransactionId};
use backstay_core::transaction::{Batch, Change, StagedRun, Stamp, Transaction};
use backstay_core::wire::peer::{decode, encode, Encoded, Introduction, PeerFrame, Purpose};
use backstay_core::wire::HEADER_BYTES;
use serde_json::{json, Value};

const SLOTS: u32 = 8;
const DIM: usize = 3;

fn space() -> SlotSpace {
    SlotSpace::new(SLOTS).unwrap()
}

/// The meta part and the body, as a receiver gets them.
fn bytes(encoded: &Encoded) -> (Vec<u8>, Vec<u8>) {
    let meta_bytes = u32::from_le_bytes(encoded.head[16..20].try_into().unwrap()) as usize;
    let meta = encoded.head[HEADER_BYTES..HEADER_BYTES + meta_bytes].to_vec();
    let mut body = encoded.head[HEADER_BYTES + meta_bytes..].to_vec();
    if let Some((transaction, ranges)) = &encoded.push {
        for range in ranges {
            body.extend(bytemuck::cast_slice::<u64, u8>(
                &transaction.batch.keys()[range.clone()],
            ));
        }
        for range in ranges {
            let values = transaction.batch.values();
            let elements = values.len() / transaction.batch.keys().len().max(1);
            let values = &values[range.start * elements..range.end * elements];
            body.extend(bytemuck::cast_slice::<f32, u8>(values));
        }
    }
    body.extend(&encoded.tail);
    let announced = u64::from_le_bytes(encoded.head[24..32].try_into().unwrap());
    assert_eq!(announced, body.len() as u64);
    (meta, body)
}

fn read(meta: &[u8], body: &[u8]) -> Result<PeerFrame, Refusal> {
    let mut words = vec![0u64; body.len().div_ceil(8)];
    bytemuck::cast_slice_mut(&mut words)[..body.len()].copy_from_slice(body);
    decode(space(), meta, words, body.len())
}

fn stream(job: u64) -> StreamId {
    StreamId {
        job,
        pass: 2,
        task: 3,
    }
}

fn order(slot: u32) -> SlotOrder {
    SlotOrder {
        slot,
        term: 4,
        version: 5,
        epoch: 6,
        decided: 7,
        end: 8,
    }
}

/// A push of keys in all slots, and the places of every second one.
fn push() -> (Arc<Transaction>, Vec<StagedRun>) {
    let mut keys: Vec<u64> = (0..40).collect();
    keys.sort_by_key(|&key| space().slot_of(key));
    let values: Vec<f32> = (0..keys.len() * DIM).map(|n| n as f32).collect();
    let id = TransactionId {
        stream: stream(1),
        sequence: 9,
    };
    let change = Change::update(0.5);
    let batch = Batch::new(&keys, &values);
    let mut push = Transaction::new(space(), id, 8, 77, change, batch).unwrap();
    push.compensation = Compensation::Scale;
    let sgd = Optimizer::Sgd(Sgd {
        learning_rate: 0.25,
    });
    push.optimizer = Some(sgd.stamp());
    let place = |(n, run): (usize, &_)| StagedRun {
        term: 2,
        position: 100 + n as u64,
        run: *run,
    };
    let places = push.runs().iter().enumerate().step_by(2).map(place);
    let places = places.collect();
    (Arc::new(push), places)
}

fn messages() -> Vec<Message> {
    let memory = SlotMemory {
        position: 11,
        streams: vec![(
            stream(1),
            StreamWindow {
                floor: 3,
                applied: 5 << 70 | 1,
            },
        )],
        closed: vec![stream(2), stream(3)],
        time: 12,
        updates: vec![(77, 13), (78, 1)],
    };
    let rows = (vec![1, 2, 3], vec![0.5; 3 * DIM], vec![0.25; 3]);
    let refused = |reason| Message::Refused { number: 4, reason };
    let mut messages = vec![
        Message::Heartbeat {
            sent_at: 1,
            version: 2,
        },
        Message::Commit { decided: 4 },
        Message::Forget { slots: vec![1, 3] },
        Message::Rollback {
            lsns: vec![5, 6, 9],
        },
        Message::Recover {
            number: 1,
            lsn: 2,
            slots: vec![order(0), order(7)],
        },
        Message::CopyBegin { slot: order(3) },
        Message::CopyRows {
            slot: 3,
            table: 77,
            rows,
        },
        Message::CopyEnd {
            number: 2,
            slot: order(3),
            memory,
        },
        Message::ReadLease {
            sent_at: 1,
            version: 2,
        },
        Message::CopyTaken {
            slot: 3,
            failed: true,
        },
        Message::Accepted { number: 3 },
    ];
    let reasons = [
        Refuse::OldTerm,
        Refuse::Gap,
        Refuse::NoCopy,
        Refuse::Rows(Refusal::MemoryLimit("full".into())),
        Refuse::Rows(Refusal::NoRoomEver("too much".into())),
    ];
    messages.extend(reasons.map(refused));
    messages
}

#[test]
fn what_is_laid_out_is_read_back() {
    for message in messages() {
        let (meta, body) = bytes(&encode(&message));
        let PeerFrame::Message(back) = read(&meta, &body).unwrap() else {
            panic!("{message:?} came back as an introduction");
        };
        assert_eq!(format!("{back:?}"), format!("{message:?}"));
    }
    let introduction = Introduction {
        instance: 42,
        connection: 7,
        purpose: Purpose::Heartbeats,
    };
    let (meta, body) = bytes(&introduction.encode());
    let back = read(&meta, &body).unwrap();
    assert!(matches!(back, PeerFrame::Introduction(same) if same == introduction));
}

#[test]
fn a_prepare_carries_the_keys_of_its_places() {
    let (transaction, places) = push();
    let message = Message::Prepare {
        number: 1,
        lsn: 2,
        decided: 1,
        places: places.clone(),
        transaction: Arc::clone(&transaction),
    };
    let (meta, body) = bytes(&encode(&message));
    let PeerFrame::Message(Message::Prepare {
        places: back,
        transaction: got,
        ..
    }) = read(&meta, &body).unwrap()
    else {
        panic!("no prepare came back");
    };
    assert_eq!((got.id, got.floor, got.table), (transaction.id, 8, 77));
    assert_eq!(got.change, transaction.change);
    assert_eq!(got.optimizer, transaction.optimizer);
    assert_eq!(got.compensation, Compensation::Scale);
    for (place, sent) in back.iter().zip(&places) {
        assert_eq!((place.term, place.position), (sent.term, sent.position));
        assert_eq!(place.run.slot, sent.run.slot);
        let keys = |t: &Transaction, p: &StagedRun| {
            t.batch.keys()[p.run.start as usize..p.run.end as usize].to_vec()
        };
        assert_eq!(keys(&got, place), keys(&transaction, sent));
        let values = |t: &Transaction, p: &StagedRun| {
            t.batch.values()[p.run.start as usize * DIM..p.run.end as usize * DIM].to_vec()
        };
        assert_eq!(values(&got, place), values(&transaction, sent));
    }
    assert_eq!(back.len(), places.len());
}

/// Every optimizer with a number of its own for each setting, and each with one flag more.
fn every_setting_of_every_optimizer() -> Vec<Optimizer> {
    let mut all = Vec::new();
    for &(name, numbers) in Optimizer::RANGES {
        let mut settings = serde_json::Map::new();
        for (at, &(field, (_, high))) in numbers.iter().enumerate() {
            let part = 1.0 / (at as f64 + 2.0);
            settings.insert(field.into(), if high > 0.0 { part } else { -part }.into());
        }
        let plain: Optimizer = serde_json::from_value(json!({ name: settings })).unwrap();
        let without_flags = serde_json::to_value(&plain).unwrap();
        all.push(plain);
        for (field, value) in without_flags[name].as_object().unwrap() {
            let mut flagged = without_flags.clone();
            flagged[name][field] = match value {
                Value::Bool(flag) => (!flag).into(),
                Value::String(_) => "global".into(),
                _ => continue,
            };
            all.push(serde_json::from_value(flagged).unwrap());
        }
    }
    all
}

#[test]
fn a_prepare_carries_the_settings_it_is_applied_under() {
    let (transaction, places) = push();
    for optimizer in every_setting_of_every_optimizer() {
        let mut stamped = (*transaction).clone();
        stamped.optimizer = Some(optimizer.stamp());
        let message = Message::Prepare {
            number: 1,
            lsn: 2,
            decided: 1,
            places: places.clone(),
            transaction: Arc::new(stamped.clone()),
        };
        let (meta, body) = bytes(&encode(&message));
        let PeerFrame::Message(Message::Prepare {
            transaction: got, ..
        }) = read(&meta, &body).unwrap()
        else {
            panic!("no prepare came back");
        };
        assert_eq!(got.optimizer, stamped.optimizer, "{optimizer:?}");
        let under = got.optimizer.and_then(|stamp| optimizer.under(&stamp));
        assert_eq!(under, Some(optimizer));
    }
}

#[test]
fn a_prepare_carries_what_is_done_about_its_staleness() {
    let (transaction, places) = push();
    for staleness in [
        r#""ignore""#,
        r#""scale""#,
        r#"{"delay_compensated":{"strength":0.5,"adaptive":false,"decay":0.25,"epsilon":0.125}}"#,
        r#"{"delay_compensated":{"strength":0.5,"adaptive":true,"decay":0.25,"epsilon":0.125}}"#,
        r#""adaptive_revision""#,
    ] {
        let mut one = (*transaction).clone();
        one.compensation = serde_json::from_str(staleness).unwrap();
        let message = Message::Prepare {
            number: 1,
            lsn: 2,
            decided: 1,
            places: places.clone(),
            transaction: Arc::new(one.clone()),
        };
        let (meta, body) = bytes(&encode(&message));
        let PeerFrame::Message(Message::Prepare {
            transaction: got, ..
        }) = read(&meta, &body).unwrap()
        else {
            panic!("no prepare came back");
        };
        assert_eq!(got.compensation, one.compensation, "{staleness}");
    }
}

/// The bytes of a push that does not tell origins are as long as ever.
#[test]
fn a_prepare_carries_the_origins_of_its_places() {
    let (untold, _) = push();
    let mut told = (*untold).clone();
    let origins: Vec<u64> = (0..told.runs().len() as u64).map(|n| 1000 + n).collect();
    told.tell_origins(&origins).unwrap();
    let sizes = [(*untold).clone(), told].map(|transaction| {
        let places = transaction.runs().iter().step_by(2).map(|run| StagedRun {
            term: 2,
            position: 100,
            run: *run,
        });
        let places: Vec<StagedRun> = places.collect();
        let message = Message::Prepare {
            number: 1,
            lsn: 2,
            decided: 1,
            places: places.clone(),
            transaction: Arc::new(transaction),
        };
        let (meta, body) = bytes(&encode(&message));
        let PeerFrame::Message(Message::Prepare {
            places: back,
            transaction: got,
            ..
        }) = read(&meta, &body).unwrap()
        else {
            panic!("no prepare came back");
        };
        let origins = |places: &[StagedRun]| -> Vec<u64> {
            places.iter().map(|place| place.run.origin).collect()
        };
        assert_eq!(origins(&back), origins(&places));
        let runs: Vec<u64> = got.runs().iter().map(|run| run.origin).collect();
        assert_eq!(runs, origins(&places));
        assert!(read(&meta, &body[..body.len() - 8]).is_err());
        (meta.len(), body.len(), back.len())
    });
    let [(meta, body, places), told] = sizes;
    assert_eq!(told, (meta, body + 8 * places, places));
}

#[test]
fn the_end_of_a_stream_carries_its_slots() {
    let id = TransactionId {
        stream: stream(5),
        sequence: u64::MAX,
    };
    let close = Arc::new(Transaction::close(id, [1, 4]));
    let place = |run: &_| StagedRun {
        term: 1,
        position: 3,
        run: *run,
    };
    let places: Vec<StagedRun> = close.runs().iter().map(place).collect();
    let message = Message::Prepare {
        number: 1,
        lsn: 2,
        decided: 0,
        places: places.clone(),
        transaction: close,
    };
    let (meta, body) = bytes(&encode(&message));
    let back = read(&meta, &body).unwrap();
    let PeerFrame::Message(Message::Prepare {
        places: back,
        transaction,
        ..
    }) = back
    else {
        panic!("no prepare came back");
    };
    assert_eq!((transaction.change, transaction.id), (Change::Close, id));
    assert_eq!(back, places);
}

#[test]
fn a_prepare_of_a_delete_carries_keys_and_no_values() {
    let (push, places) = push();
    let batch = Batch::new(push.batch.keys(), &[]);
    let mut delete = Transaction::new(space(), push.id, 8, 77, Change::Delete, batch).unwrap();
    delete.optimizer = push.optimizer;
    let message = Message::Prepare {
        number: 1,
        lsn: 2,
        decided: 1,
        places: places.clone(),
        transaction: Arc::new(delete),
    };
    let (meta, body) = bytes(&encode(&message));
    let PeerFrame::Message(Message::Prepare { transaction, .. }) = read(&meta, &body).unwrap()
    else {
        panic!("no prepare came back");
    };
    assert_eq!(
        (transaction.change, transaction.id),
        (Change::Delete, push.id)
    );
    let sent = places.iter().flat_map(|place| {
        let run = place.run.start as usize..place.run.end as usize;
        &push.batch.keys()[run]
    });
    assert!(transaction.batch.keys().iter().eq(sent));
    assert!(transaction.batch.values().is_empty());
}

#[test]
fn a_prepare_carries_the_stamp_of_its_master_and_what_it_is_to_do() {
    let (push, places) = push();
    let thresholds = Thresholds {
        unseen_seconds: Some(5),
        norm_below: Some(0.5),
        ..Thresholds::default()
    };
    for (change, width) in [
        (Change::Expire(thresholds), 0),
        (Change::Evict, 0),
        (Change::Decay { rate: 0.5 }, 0),
        (Change::update(0.5).counted(), DIM + 2),
    ] {
        let keys = push.batch.keys();
        let batch = Batch::new(keys, &vec![1.0; keys.len() * width]);
        let mut sent = Transaction::new(space(), push.id, 8, 77, change, batch).unwrap();
        sent.optimizer = push.optimizer;
        sent.stamp = Stamp {
            time: u32::MAX - 1,
            share: 77,
            counters: 78,
        };
        let message = Message::Prepare {
            number: 1,
            lsn: 2,
            decided: 1,
            places: places.clone(),
            transaction: Arc::new(sent.clone()),
        };
        let (meta, body) = bytes(&encode(&message));
        let PeerFrame::Message(Message::Prepare { transaction, .. }) = read(&meta, &body).unwrap()
        else {
            panic!("no prepare came back");
        };
        assert_eq!(
            (transaction.change, transaction.stamp),
            (change, sent.stamp)
        );
        let keys = transaction.batch.keys().len();
        assert_eq!(transaction.batch.values().len(), keys * width);
    }
}

/// A frame that is cut, or whose places do not fit its keys, is refused and never a panic.
#[test]
fn damaged_frames_are_refused() {
    let (transaction, places) = push();
    let prepare = Message::Prepare {
        number: 1,
        lsn: 2,
        decided: 1,
        places,
        transaction,
    };
    for message in messages().into_iter().chain([prepare.clone()]) {
        let (meta, body) = bytes(&encode(&message));
        for cut in 0..meta.len() {
            assert!(
                read(&meta[..cut], &body).is_err(),
                "{message:?} cut at {cut}"
            );
        }
        if !matches!(message, Message::Refused { .. }) {
            for cut in (0..body.len()).step_by(8) {
                assert!(
                    read(&meta, &body[..cut]).is_err(),
                    "{message:?} body cut at {cut}"
                );
            }
        }
    }
    let (meta, mut body) = bytes(&encode(&prepare));
    let foreign = (0..1000u64).find(|&key| space().slot_of(key) == SLOTS - 1);
    body[..8].copy_from_slice(&foreign.unwrap().to_le_bytes());
    assert!(read(&meta, &body).is_err());
}
