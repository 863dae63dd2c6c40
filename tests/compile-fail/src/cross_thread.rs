//! What ends of rings and slots cannot do, as programs that the compiler refuses.
//!
//! Completing a call consumes its completer.
//!
//! ```compile_fail,E0382
//! let mut table = rpcrdma::cross_thread::slot::SlotTable::<u8>::new(1);
//! let (_ticket, completer) = table.acquire().unwrap();
//! completer.complete(1);
//! completer.complete(2);
//! ```
//!
//! A thread cannot push through a shared producer.
//!
//! ```compile_fail,E0596
//! let (producer, _consumer) = rpcrdma::cross_thread::spsc::ring::<u8>(4);
//! std::thread::scope(|scope| {
//!     scope.spawn(|| (&producer).push(1));
//! });
//! ```
//!
//! A ring has one producer.
//!
//! ```compile_fail,E0599
//! let (producer, _consumer) = rpcrdma::cross_thread::spsc::ring::<u8>(4);
//! let _ = producer.clone();
//! ```
//!
//! A ring has one consumer.
//!
//! ```compile_fail,E0599
//! let (_producer, consumer) = rpcrdma::cross_thread::spsc::ring::<u8>(4);
//! let _ = consumer.clone();
//! ```
//!
//! A ring of items without `Send` stays on its thread.
//!
//! ```compile_fail,E0277
//! let (producer, _consumer) = rpcrdma::cross_thread::spsc::ring::<std::rc::Rc<u8>>(4);
//! std::thread::spawn(move || drop(producer));
//! ```
//!
//! A call has one ticket.
//!
//! ```compile_fail,E0599
//! let mut table = rpcrdma::cross_thread::slot::SlotTable::<u8>::new(1);
//! let (ticket, _completer) = table.acquire().unwrap();
//! let _ = ticket.clone();
//! ```
//!
//! A call has one completer.
//!
//! ```compile_fail,E0599
//! let mut table = rpcrdma::cross_thread::slot::SlotTable::<u8>::new(1);
//! let (_ticket, completer) = table.acquire().unwrap();
//! let _ = completer.clone();
//! ```
