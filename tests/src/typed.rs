//! Typed programs of the tests: a store of blobs, and a program whose procedures have names that Rust also uses.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rpcrdma::client::Client;
use rpcrdma::typed::{CallInfo, Deferred, Error, ReplySender, ReplySent, Response, Signature};
use rpcrdma::xdr::Bulk;
use rpcrdma::{Address, Refusal, Services};

use crate::world::{IntoServerConfig, World, small_server};
pub use protocol::typed_v1::{self, Count, Fetch, FetchAsync, FetchLater, PROGRAM, Store, VERSION};
pub use protocol::{Blob, Found, Numbers, Pair, Wanted, typed_names};

#[expect(unreachable_pub, dead_code, reason = "generated for any module")]
mod protocol {
    include!(concat!(env!("OUT_DIR"), "/typed.rs"));
}

/// A store of blobs.
#[derive(Default)]
pub struct Blobs {
    blobs: Mutex<HashMap<Vec<u8>, Vec<u8>>>,
    /// Threads that answer calls.
    pub threads: Mutex<Vec<JoinHandle<()>>>,
    /// Numbers of one-way calls.
    pub notes: Mutex<Vec<u32>>,
}

/// Computes the checksum of a blob.
pub fn sum(data: &[u8]) -> u32 {
    data.iter().fold(7, |sum: u32, &byte| sum.wrapping_mul(31).wrapping_add(byte.into()))
}

impl Blobs {
    /// Calls a function with the data of a blob, if it exists, and with the number of blobs.
    fn with_blob<T>(&self, name: &[u8], f: impl FnOnce(Option<&[u8]>, u32) -> T) -> T {
        let blobs = self.blobs.lock().expect("no panic");
        f(blobs.get(name).map(Vec::as_slice), blobs.len() as u32)
    }

    /// Writes the data of a blob into its Write chunk, and answers.
    fn answer_in_place<P>(&self, mut call: Deferred<P>)
    where
        P: for<'a> Signature<Args<'a> = Wanted<'a>, Results<'a> = Found<'a>>,
    {
        let name = call.args().name.to_vec();
        let data = self.with_blob(&name, |data, _| data.map(<[u8]>::to_vec));
        let Some(data) = data else {
            // The reply must not contain this data, because it reports a missing blob.
            call.data().expect("a writer").put(b"left").expect("room for 4 bytes");
            return call.send(&Found::Missing(self.with_blob(b"", |_, count| count)));
        };
        let max_len = call.args().max_bytes as usize;
        let mut writer = match call.data() {
            Ok(writer) => writer,
            Err(refusal) => return call.refuse(refusal),
        };
        let len = data.len().min(max_len).min(writer.room());
        writer.put(&data[..len]).expect("room for the data");
        let blob = Blob { name: &name, data: Bulk::placed(len), checksum: sum(&data[..len]) };
        call.send(&Found::Found(blob));
    }
}

impl typed_v1::Server for Arc<Blobs> {
    fn add(
        &self,
        _: CallInfo<'_>,
        args: (i32, i32),
        answer: ReplySender<'_, typed_v1::Add>,
    ) -> Result<ReplySent, Refusal> {
        answer.send(&args.0.wrapping_add(args.1))
    }

    fn store(&self, info: CallInfo<'_>, blob: Blob<'_>, answer: ReplySender<'_, Store>) -> Result<ReplySent, Refusal> {
        assert_eq!((info.program(), info.version(), info.procedure()), (PROGRAM, VERSION, Store::NUMBER));
        let data = blob.data.bytes();
        if blob.checksum != sum(data) {
            return Err(Refusal::GarbageArguments);
        }
        self.blobs.lock().expect("no panic").insert(blob.name.to_vec(), data.to_vec());
        answer.send(&sum(data))
    }

    fn fetch(&self, _: CallInfo<'_>, wanted: Wanted<'_>, answer: ReplySender<'_, Fetch>) -> Result<ReplySent, Refusal> {
        self.with_blob(wanted.name, |data, count| match data {
            Some(data) => {
                let data = &data[..data.len().min(wanted.max_bytes as usize)];
                answer.send(&Found::Found(Blob { name: wanted.name, data: data.into(), checksum: sum(data) }))
            }
            None => answer.send(&Found::Missing(count)),
        })
    }

    fn fetch_later(&self, call: Deferred<FetchLater>) {
        let blobs = Arc::clone(self);
        let thread = std::thread::spawn(move || blobs.answer_in_place(call));
        self.threads.lock().expect("no panic").push(thread);
    }

    fn fetch_async(&self, call: Deferred<FetchAsync>) -> impl Future<Output = ()> + 'static {
        let blobs = Arc::clone(self);
        async move { blobs.answer_in_place(call) }
    }

    fn note(
        &self,
        _: CallInfo<'_>,
        number: u32,
        answer: ReplySender<'_, typed_v1::Note>,
    ) -> Result<ReplySent, Refusal> {
        self.notes.lock().expect("no panic").push(number);
        answer.send(&())
    }

    fn note_later(&self, call: Deferred<typed_v1::NoteLater>) {
        // The drop completes the call, because it is one-way. A call with a reply would get SYSTEM_ERR.
        self.notes.lock().expect("no panic").push(call.args());
    }

    fn sum(
        &self,
        _: CallInfo<'_>,
        blob: Blob<'_>,
        answer: ReplySender<'_, typed_v1::Sum>,
    ) -> Result<ReplySent, Refusal> {
        answer.send(&sum(blob.data.bytes()))
    }

    fn swap(
        &self,
        _: CallInfo<'_>,
        pair: Pair<'_>,
        answer: ReplySender<'_, typed_v1::Swap>,
    ) -> Result<ReplySent, Refusal> {
        answer.send(&Pair { first: pair.second, second: pair.first })
    }

    fn count(&self, _: CallInfo<'_>, end: u32, answer: ReplySender<'_, Count>) -> Result<ReplySent, Refusal> {
        let numbers: Vec<u32> = (0..end).collect();
        answer.send(&Numbers(numbers[..].into()))
    }
}

/// A world with a server of the blob store.
pub fn serving(name: &'static str) -> (World, Address, Arc<Blobs>) {
    let (services, blobs) = services();
    let (world, address) = World::serving(name, small_server().with_workers(1), services);
    (world, address, blobs)
}

/// The services of the blob store, and their blobs.
pub fn services() -> (Services, Arc<Blobs>) {
    let (mut services, blobs) = (Services::new(), Arc::new(Blobs::default()));
    typed_v1::add(&mut services, &Arc::new(Arc::clone(&blobs)));
    (services, blobs)
}

/// The results of a successful reply.
pub fn value<P, T>(response: Result<Response<P>, Error>) -> T
where
    P: for<'a> Signature<Results<'a> = T>,
{
    response.expect("a reply").results().expect("results")
}

/// A server whose procedures return the sum of their argument and their number.
pub struct Names;

macro_rules! names {
    ($($method:ident: $signature:ident),*) => {
        impl typed_names::Server for Names {
            $(fn $method(
                &self,
                _: CallInfo<'_>,
                arg: i32,
                answer: ReplySender<'_, typed_names::$signature>,
            ) -> Result<ReplySent, Refusal> {
                answer.send(&(arg + typed_names::$signature::NUMBER as i32))
            })*

            fn into_(&self, call: Deferred<typed_names::Into>) {
                let sum = call.args() + typed_names::Into::NUMBER as i32;
                call.send(&sum);
            }

            fn clone_(&self, call: Deferred<typed_names::Clone>) -> impl Future<Output = ()> + 'static {
                let sum = call.args() + typed_names::Clone::NUMBER as i32;
                async move { call.send(&sum) }
            }

            fn future(&self, call: Deferred<typed_names::Future>) -> impl Future<Output = ()> + 'static {
                let sum = call.args() + typed_names::Future::NUMBER as i32;
                async move { call.send(&sum) }
            }
        }

        /// Calls each procedure. Returns the numbers of the procedures: their results minus the argument.
        pub fn call_names(client: &mut typed_names::Client<Client>) -> Vec<i32> {
            let mut numbers = vec![$(value(client.$method(&100)) - 100),*];
            let deferred = [value(client.into_(&100)), value(client.clone_(&100)), value(client.future(&100))];
            numbers.extend(deferred.map(|sum| sum - 100));
            numbers
        }
    };
}
names! {
    send: Send, sync: Sync, sized: Sized, to_owned_: ToOwned, as_ref: AsRef, drop: Drop, s: S_, t: T_, f: F_,
    r#fn: Fn, copy: Copy, run: Run, add: Add
}
