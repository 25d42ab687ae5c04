//! The wire format against `proto/vectors/`, which a second implementation wrote from the
//! specification: every kind of frame both ways, damaged frames, and the hashes.

// What fails in a helper is a failed test.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use backstay_core::compensation::{Compensation, Reference};
use backstay_core::error::Refusal;
use backstay_core::hash::{dense_block_key, mix64, table_id, SlotSpace};
use backstay_core::life::Thresholds;
use backstay_core::staleness::PushStaleness;
use backstay_core::stream::{StreamId, TransactionId};
use backstay_core::transaction::{Change, Update};
use backstay_core::wire::{
    checksum, CloseStream, DeleteReply, ErrorMeta, ExpireReply, Header, Hello, HelloReply, Limits,
    Opcode, PullMeta, PullReply, PushMeta, PushReply, FLAG_CHECKSUM, HEADER_BYTES,
};
use serde_json::Value;

const FRAMES: &str = include_str!("../../../proto/vectors/frames.json");
const HOSTILE: &str = include_str!("../../../proto/vectors/hostile.json");
const HASHES: &str = include_str!("../../../proto/vectors/hashes.json");

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

fn small(value: &Value) -> u32 {
    number(value).try_into().unwrap()
}

fn bytes(hex: &Value) -> Vec<u8> {
    let digits = text(hex);
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
        .collect()
}

fn stream(fields: &Value) -> StreamId {
    StreamId {
        job: number(&fields["job"]),
        pass: small(&fields["pass"]),
        task: small(&fields["task"]),
    }
}

fn thresholds(fields: &Value) -> Thresholds {
    let set = |flag: u64| number(&fields["thresholds"]) & flag != 0;
    Thresholds {
        unseen_seconds: set(1).then(|| small(&fields["unseen_seconds"])),
        score_below: set(2).then(|| fields["score_below"].as_f64().unwrap()),
        norm_below: set(4).then(|| fields["norm_below"].as_f64().unwrap()),
    }
}

fn staleness(fields: &Value) -> Option<PushStaleness> {
    Some(PushStaleness {
        known: number(fields.get("known_slots")?),
        unknown: number(&fields["unknown_slots"]),
        sum: number(&fields["staleness_sum"]),
        max: small(&fields["staleness_max"]),
    })
}

fn push(fields: &Value) -> PushMeta {
    let change = match number(&fields["kind"]) {
        kind @ (0 | 5 | 8..=11) => Change::Update(Update {
            learning_rate_scale: fields["learning_rate_scale"].as_f64().unwrap() as f32,
            reference: match kind {
                8 | 9 => Some(Reference::Weights),
                10 | 11 => Some(Reference::Sum),
                _ => None,
            },
            has_counts: matches!(kind, 5 | 9 | 11),
        }),
        4 => Change::Delete,
        6 => Change::Expire(thresholds(fields)),
        7 => Change::Decay {
            rate: fields["learning_rate_scale"].as_f64().unwrap() as f32,
        },
        kind => Change::Assign {
            only_if_absent: kind == 2,
        },
    };
    PushMeta {
        table: number(&fields["table"]),
        routing_version: number(&fields["routing_version"]),
        id: TransactionId {
            stream: stream(fields),
            sequence: number(&fields["sequence"]),
        },
        floor: number(&fields["floor"]),
        key_count: small(&fields["key_count"]),
        row_elements: small(&fields["row_elements"]),
        change,
        origins: number(&fields["flags"]) == 1,
        compensation: match number(&fields["compensation"]) {
            0 => Compensation::Ignore,
            _ => Compensation::Scale,
        },
    }
}

/// Our encoding of the fields, after `meta` has been decoded to the same value.
fn both_ways<T: PartialEq + std::fmt::Debug>(
    meta: &[u8],
    value: &T,
    decode: impl Fn(&[u8]) -> Result<T, Refusal>,
    encode: impl Fn(&T) -> Vec<u8>,
) -> Vec<u8> {
    assert_eq!(decode(meta).as_ref(), Ok(value));
    encode(value)
}

/// The opcode of a vector's kind and our encoding of its meta part.
fn meta_of(kind: &str, fields: &Value, meta: &[u8]) -> (Opcode, Vec<u8>) {
    match kind {
        "Hello" | "Pull" | "Push" | "Delete" | "CloseStream" | "Expire" | "CountExpired"
        | "Decay" => request_meta(kind, fields, meta),
        "HelloReply" | "PullReply" | "PushReply" | "DeleteReply" | "ExpireReply" | "Error" => {
            reply_meta(kind, fields, meta)
        }
        "Ping" => (Opcode::Ping, Vec::new()),
        "Pong" => (Opcode::Pong, Vec::new()),
        "CloseStreamReply" => (Opcode::CloseStreamReply, Vec::new()),
        "GoAway" => (Opcode::GoAway, Vec::new()),
        other => panic!("a vector of an unknown kind {other}"),
    }
}

fn request_meta(kind: &str, fields: &Value, meta: &[u8]) -> (Opcode, Vec<u8>) {
    match kind {
        "Hello" => {
            let hello = Hello {
                cluster_id: text(&fields["cluster_id"]),
                token: text(&fields["token"]),
                client_name: text(&fields["client_name"]),
            };
            let ours = both_ways(meta, &hello, Hello::decode, Hello::encode);
            (Opcode::Hello, ours)
        }
        "Pull" => {
            let pull = PullMeta {
                table: number(&fields["table"]),
                routing_version: number(&fields["routing_version"]),
                key_count: small(&fields["key_count"]),
                row_elements: small(&fields["row_elements"]),
                origins: fields
                    .get("flags")
                    .is_some_and(|flags| number(flags) & 1 != 0),
                sums: fields
                    .get("flags")
                    .is_some_and(|flags| number(flags) & 2 != 0),
            };
            let ours = both_ways(meta, &pull, PullMeta::decode, PullMeta::encode);
            (Opcode::Pull, ours)
        }
        "Push" => {
            let ours = both_ways(meta, &push(fields), PushMeta::decode, PushMeta::encode);
            (Opcode::Push, ours)
        }
        "Delete" | "Expire" | "CountExpired" | "Decay" => {
            let ours = both_ways(meta, &push(fields), PushMeta::decode, PushMeta::encode);
            let opcode = match kind {
                "Delete" => Opcode::Delete,
                "Expire" => Opcode::Expire,
                "Decay" => Opcode::Decay,
                _ => Opcode::CountExpired,
            };
            (opcode, ours)
        }
        _ => {
            let close = CloseStream {
                stream: stream(fields),
                routing_version: number(&fields["routing_version"]),
            };
            let ours = both_ways(meta, &close, CloseStream::decode, CloseStream::encode);
            (Opcode::CloseStream, ours)
        }
    }
}

fn reply_meta(kind: &str, fields: &Value, meta: &[u8]) -> (Opcode, Vec<u8>) {
    let routing_version = number(&fields["routing_version"]);
    match kind {
        "HelloReply" => {
            let reply = HelloReply {
                instance: number(&fields["instance"]),
                max_frame_bytes: number(&fields["max_frame_bytes"]),
                max_keys: small(&fields["max_keys"]),
                slot_count: small(&fields["slot_count"]),
                routing_version,
                node_id: text(&fields["node_id"]),
            };
            let ours = both_ways(meta, &reply, HelloReply::decode, HelloReply::encode);
            (Opcode::HelloReply, ours)
        }
        "PullReply" => {
            let reply = PullReply {
                routing_version,
                row_count: small(&fields["row_count"]),
                row_elements: small(&fields["row_elements"]),
            };
            let ours = both_ways(meta, &reply, PullReply::decode, |r| r.encode().to_vec());
            (Opcode::PullReply, ours)
        }
        "PushReply" => {
            let reply = PushReply {
                routing_version,
                applied_slots: small(&fields["applied_slots"]),
                skipped_slots: small(&fields["skipped_slots"]),
                stale: staleness(fields),
            };
            let ours = both_ways(meta, &reply, PushReply::decode, PushReply::encode);
            (Opcode::PushReply, ours)
        }
        "ExpireReply" => {
            let reply = ExpireReply {
                routing_version,
                applied_slots: small(&fields["applied_slots"]),
                skipped_slots: small(&fields["skipped_slots"]),
                unseen: number(&fields["unseen"]),
                score: number(&fields["score"]),
                norm: number(&fields["norm"]),
                counters: number(&fields["counters"]),
            };
            let ours = both_ways(meta, &reply, ExpireReply::decode, ExpireReply::encode);
            (Opcode::ExpireReply, ours)
        }
        "DeleteReply" => {
            let reply = DeleteReply {
                routing_version,
                applied_slots: small(&fields["applied_slots"]),
                skipped_slots: small(&fields["skipped_slots"]),
                rows: number(&fields["rows"]),
            };
            let ours = both_ways(meta, &reply, DeleteReply::decode, DeleteReply::encode);
            (Opcode::DeleteReply, ours)
        }
        _ => {
            let error = ErrorMeta {
                code: small(&fields["code"]).try_into().unwrap(),
                retry_safe: number(&fields["retry_safe"]) == 1,
                routing_version,
            };
            let ours = both_ways(meta, &error, ErrorMeta::decode, ErrorMeta::encode);
            (Opcode::Error, ours)
        }
    }
}

/// Header, meta and body.
type Parts<'a> = (Header, &'a [u8], &'a [u8]);

/// A frame's parts, or why a receiver with this limit takes no frame from the bytes.
fn take(bytes: &[u8], max_frame_bytes: u64) -> Result<Parts<'_>, Option<Refusal>> {
    let limits = Limits {
        max_frame_bytes,
        max_keys: u32::MAX,
    };
    let (head, rest) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or(None)?;
    let header = Header::decode(head, &limits).map_err(Some)?;
    let cut = rest.split_at_checked(header.meta_bytes as usize);
    let (meta, body) = cut.ok_or(None)?;
    if (body.len() as u64) < header.body_bytes {
        return Err(None);
    }
    header.verify(meta, body).map_err(Some)?;
    Ok((header, meta, body))
}

#[test]
fn every_frame_encodes_and_decodes() {
    let vectors = parse(FRAMES);
    assert!(list(&vectors).len() >= 12);
    for vector in list(&vectors) {
        let name = text(&vector["name"]);
        let wanted = bytes(&vector["hex"]);
        let (header, meta, body) = take(&wanted, 1 << 20).expect(&name);
        let (opcode, ours) = meta_of(&text(&vector["kind"]), &vector["fields"], meta);
        let flags = number(&vector["flags"]) as u16;
        let built = Header {
            opcode,
            flags,
            request_id: number(&vector["request_id"]),
            meta_bytes: ours.len() as u32,
            checksum: if flags == FLAG_CHECKSUM {
                checksum(&ours, body)
            } else {
                0
            },
            body_bytes: body.len() as u64,
        };
        assert_eq!(header, built, "{name}");
        assert_eq!(body, bytes(&vector["body"]), "{name}");
        assert_eq!(
            [&built.encode()[..], &ours, body].concat(),
            wanted,
            "{name}"
        );
    }
}

/// What the decoder of the frame's own kind says.
fn decode_meta(header: &Header, meta: &[u8]) -> Result<(), Refusal> {
    match header.opcode {
        Opcode::Hello => Hello::decode(meta).map(drop),
        Opcode::Pull => PullMeta::decode(meta).map(drop),
        Opcode::Push | Opcode::Expire | Opcode::Decay => PushMeta::decode(meta).map(drop),
        other => panic!("no hostile vector is a {other:?}"),
    }
}

#[test]
fn every_damaged_frame_is_refused_as_written() {
    let file = parse(HOSTILE);
    for vector in list(&file["frames"]) {
        let name = text(&vector["name"]);
        let bytes = bytes(&vector["hex"]);
        let taken = take(&bytes, number(&file["max_frame_bytes"]));
        let refusal = if vector["part"] == "frame" {
            taken.map(drop).expect_err(&name)
        } else {
            let (header, meta, _) = taken.expect(&name);
            Some(decode_meta(&header, meta).expect_err(&name))
        };
        match refusal {
            None => assert_eq!(vector["error"], "truncated", "{name}"),
            Some(refusal) => assert_eq!(vector["error"], refusal.code(), "{name}: {refusal}"),
        }
    }
}

#[test]
fn hashes_are_the_same_everywhere() {
    let file = parse(HASHES);
    for row in list(&file["mix64"]) {
        assert_eq!(mix64(number(&row["key"])), number(&row["mixed"]));
    }
    for row in list(&file["slots"]) {
        let space = SlotSpace::new(small(&row["slot_count"])).unwrap();
        assert_eq!(
            space.slot_of(number(&row["key"])),
            small(&row["slot"]),
            "{row}"
        );
    }
    for row in list(&file["table_ids"]) {
        assert_eq!(table_id(&text(&row["name"])), number(&row["id"]), "{row}");
    }
    for row in list(&file["dense_block_keys"]) {
        let key = dense_block_key(number(&row["table"]), number(&row["block"]));
        assert_eq!(key, number(&row["key"]), "{row}");
    }
}
