//! Frames between servers, read and checked.

use std::sync::Arc;

use super::super::frame::Reader;
use super::super::message::PushMeta;
use super::super::settings::{read_optimizer, read_stamp};
use super::{
    words_of_place, Introduction, PeerFrame, Purpose, CLOSED_WORDS, ORDER_WORDS, PEER_VERSION,
    PLACE_WORDS, STREAM_WORDS, UPDATES_WORDS,
};
use crate::engine::SlotMemory;
use crate::error::{code, Refusal};
use crate::hash::SlotSpace;
use crate::optimizer::OptimizerStamp;
use crate::replication::message::{Message, Refuse, SlotOrder};
use crate::staleness::UNTOLD;
use crate::stream::{StreamId, StreamWindow};
use crate::transaction::{Batch, Run, StagedRun, Transaction};

/// The meta part of an introduction.
const INTRODUCTION_BYTES: usize = 8 + 4 * 8;

/// Read a frame: its meta part, and its body in an aligned buffer of which `body_bytes` count.
pub fn decode(
    space: SlotSpace,
    meta: &[u8],
    body: Vec<u64>,
    body_bytes: usize,
) -> Result<PeerFrame, Refusal> {
    let mut fields = Reader::new(meta);
    let kind = fields.u8()?;
    fields.take(7)?;
    let mut words = Words {
        rest: &body[..body_bytes / 8],
        slots: space.count(),
    };
    let message = match kind {
        1 if meta.len() != INTRODUCTION_BYTES => return Err(other_version()),
        1 => return decode_introduction(fields),
        2 => Message::Heartbeat {
            sent_at: fields.u64()?,
            version: fields.u64()?,
        },
        3 | 4 => return decode_prepare(space, kind == 4, fields, body, body_bytes),
        5 => Message::Commit {
            decided: fields.u64()?,
        },
        6 => {
            let count = fields.u64()?;
            Message::Rollback {
                lsns: words.take(count)?.to_vec(),
            }
        }
        15 => decode_forget(&mut fields, &mut words)?,
        7 => {
            let (number, lsn, count) = (fields.u64()?, fields.u64()?, fields.u64()?);
            let slots = (0..count)
                .map(|_| words.order())
                .collect::<Result<_, _>>()?;
            Message::Recover { number, lsn, slots }
        }
        8 => Message::CopyBegin {
            slot: words.order()?,
        },
        9 => decode_copy_rows(&mut fields, &mut words)?,
        10 => decode_copy_end(&mut fields, &mut words)?,
        11 => Message::ReadLease {
            sent_at: fields.u64()?,
            version: fields.u64()?,
        },
        14 => Message::CopyTaken {
            slot: words.slot(fields.u64()?)?,
            failed: fields.u64()? != 0,
        },
        12 => Message::Accepted {
            number: fields.u64()?,
        },
        13 => {
            let (number, code) = (fields.u64()?, fields.u64()?);
            let text = &bytemuck::cast_slice::<u64, u8>(&body)[..body_bytes];
            let reason = decode_reason(code, &String::from_utf8_lossy(text));
            Message::Refused { number, reason }
        }
        _ => {
            return Err(Refusal::Protocol(format!(
                "unknown kind {kind} between servers"
            )))
        }
    };
    fields.end()?;
    Ok(PeerFrame::Message(message))
}

fn decode_introduction(mut fields: Reader<'_>) -> Result<PeerFrame, Refusal> {
    let introduction = Introduction {
        instance: fields.u64()?,
        connection: fields.u64()?,
        purpose: match fields.u64()? {
            0 => Purpose::Orders,
            1 => Purpose::Heartbeats,
            other => {
                let reason = format!("a connection for unknown purpose {other}");
                return Err(Refusal::Protocol(reason));
            }
        },
    };
    if fields.u64()? != PEER_VERSION {
        return Err(other_version());
    }
    fields.end()?;
    Ok(PeerFrame::Introduction(introduction))
}

fn other_version() -> Refusal {
    Refusal::Protocol(format!(
        "a server of another release connects; this one speaks version {PEER_VERSION} of the \
         messages between servers: use matching releases"
    ))
}

fn decode_reason(code: u64, text: &str) -> Refuse {
    match code {
        0 => Refuse::OldTerm,
        1 => Refuse::Gap,
        2 => Refuse::NoCopy,
        3 => Refuse::Rows(Refusal::NoRoomEver(text.into())),
        _ if code == 0x100 + u64::from(code::MEMORY_LIMIT) => {
            Refuse::Rows(Refusal::MemoryLimit(text.into()))
        }
        _ => Refuse::Rows(Refusal::InvalidRequest(text.into())),
    }
}

fn decode_prepare(
    space: SlotSpace,
    is_close: bool,
    mut fields: Reader<'_>,
    body: Vec<u64>,
    body_bytes: usize,
) -> Result<PeerFrame, Refusal> {
    let (number, lsn, decided) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let count = fields.u64()? as usize;
    let mut optimizer = [0; OptimizerStamp::WORDS];
    for word in &mut optimizer {
        *word = fields.u64()?;
    }
    let stamp = read_stamp([fields.u64()?, fields.u64()?]);
    let push = PushMeta::decode_of_peer(fields.rest())?;
    let (keys, elements) = (push.key_count as usize, push.row_elements as usize);
    let values = keys.saturating_mul(elements);
    let data_words = keys.saturating_add(values.div_ceil(2));
    let wanted = data_words.saturating_add(count.saturating_mul(words_of_place(push.origins)));
    if wanted != body_bytes / 8 {
        return Err(short());
    }
    let places = read_places(space, &body[data_words..wanted], count)?;
    let mut transaction = if is_close {
        Transaction::close(push.id, places.iter().map(|place| place.run.slot))
    } else {
        let batch = Batch::from_words(body, keys, values)?;
        let mut whole =
            Transaction::new(space, push.id, push.floor, push.table, push.change, batch)?;
        let origins: Vec<u64> = places.iter().map(|place| place.run.origin).collect();
        let told = whole.tell_origins(&origins);
        // Its runs are computed anew from the keys, so damaged places are noticed here.
        let runs = places.iter().map(|place| &place.run);
        if told.is_err() || !whole.runs().iter().eq(runs) {
            return Err(Refusal::Protocol("places do not fit their keys".into()));
        }
        whole
    };
    transaction.optimizer = read_optimizer(optimizer)?;
    transaction.stamp = stamp;
    transaction.compensation = push.compensation;
    Ok(PeerFrame::Message(Message::Prepare {
        number,
        lsn,
        decided,
        places,
        transaction: Arc::new(transaction),
    }))
}

/// Read places, and the origins behind them if there are any.
fn read_places(space: SlotSpace, words: &[u64], count: usize) -> Result<Vec<StagedRun>, Refusal> {
    let (words, origins) = words.split_at(count * PLACE_WORDS);
    let origins = origins.iter().copied().chain(std::iter::repeat(UNTOLD));
    let mut places = Vec::with_capacity(count);
    let mut start = 0u32;
    for (words, origin) in words.chunks_exact(PLACE_WORDS).zip(origins) {
        let (slot, keys) = (words[0] as u32, (words[0] >> 32) as u32);
        if slot >= space.count() {
            return Err(Refusal::Protocol(format!(
                "slot {slot} of {}",
                space.count()
            )));
        }
        let end = start.checked_add(keys).ok_or_else(short)?;
        places.push(StagedRun {
            term: words[1],
            position: words[2],
            run: Run {
                slot,
                start,
                end,
                origin,
            },
        });
        start = end;
    }
    Ok(places)
}

fn decode_forget(fields: &mut Reader<'_>, words: &mut Words<'_>) -> Result<Message, Refusal> {
    let count = fields.u64()?;
    let slots = words.take(count)?.to_vec().into_iter();
    let slots = slots.map(|slot| words.slot(slot));
    Ok(Message::Forget {
        slots: slots.collect::<Result<_, _>>()?,
    })
}

fn decode_copy_rows(fields: &mut Reader<'_>, words: &mut Words<'_>) -> Result<Message, Refusal> {
    let (slot, table) = (words.slot(fields.u64()?)?, fields.u64()?);
    let (keys, wide, deep) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let keys = words.take(keys)?.to_vec();
    let floats: &[f32] = bytemuck::cast_slice(words.rest);
    let (wide, deep) = (wide as usize, deep as usize);
    if floats.len() < wide.saturating_add(deep) {
        return Err(short());
    }
    let rows = (
        keys,
        floats[..wide].to_vec(),
        floats[wide..wide + deep].to_vec(),
    );
    Ok(Message::CopyRows { slot, table, rows })
}

fn decode_copy_end(fields: &mut Reader<'_>, words: &mut Words<'_>) -> Result<Message, Refusal> {
    let (number, position) = (fields.u64()?, fields.u64()?);
    let (streams, closed, time) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let updates = fields.u64()?;
    let slot = words.order()?;
    let id = |words: &[u64]| StreamId {
        job: words[0],
        pass: (words[1] >> 32) as u32,
        task: words[1] as u32,
    };
    let streams = words.take(streams.saturating_mul(STREAM_WORDS as u64))?;
    let streams = streams.chunks_exact(STREAM_WORDS).map(|words| {
        let applied = u128::from(words[3]) | u128::from(words[4]) << 64;
        let window = StreamWindow {
            floor: words[2],
            applied,
        };
        (id(words), window)
    });
    let streams = streams.collect();
    let closed = words.take(closed.saturating_mul(CLOSED_WORDS as u64))?;
    let updates = words.take(updates.saturating_mul(UPDATES_WORDS as u64))?;
    let updates = updates.as_chunks::<UPDATES_WORDS>().0.iter();
    Ok(Message::CopyEnd {
        number,
        slot,
        memory: SlotMemory {
            position,
            streams,
            closed: closed.chunks_exact(CLOSED_WORDS).map(id).collect(),
            time: time as u32,
            updates: updates.map(|&[table, count]| (table, count)).collect(),
        },
    })
}

/// Takes 64-bit words one after the other; refuses to go past the end.
struct Words<'a> {
    rest: &'a [u64],
    slots: u32,
}

impl<'a> Words<'a> {
    fn take(&mut self, count: u64) -> Result<&'a [u64], Refusal> {
        let count = usize::try_from(count).map_err(|_| short())?;
        let (taken, rest) = self.rest.split_at_checked(count).ok_or_else(short)?;
        self.rest = rest;
        Ok(taken)
    }

    fn slot(&self, number: u64) -> Result<u32, Refusal> {
        let slot = u32::try_from(number).ok().filter(|&slot| slot < self.slots);
        slot.ok_or_else(|| Refusal::Protocol(format!("slot {number} of {}", self.slots)))
    }

    fn order(&mut self) -> Result<SlotOrder, Refusal> {
        let words = self.take(ORDER_WORDS as u64)?;
        Ok(SlotOrder {
            slot: self.slot(words[0])?,
            term: words[1],
            version: words[2],
            epoch: words[3],
            decided: words[4],
            end: words[5],
        })
    }
}

fn short() -> Refusal {
    Refusal::Protocol("a frame between servers is shorter or longer than it says".into())
}
