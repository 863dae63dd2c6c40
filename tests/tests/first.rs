//! smoke
use rpcrdma::client::*;
use rpcrdma::server::*;
use rpcrdma::*;
#[test]
fn echo() {
    let address: Address = format!("soft:first-{}", std::process::id()).parse().unwrap();
    let mut services = Services::new();
    services.add(
        0x2000_0001,
        1,
        1,
        Procedure::new(|call| {
            let args = call.args().to_vec();
            call.reply_mut(args.len()).unwrap().copy_from_slice(&args);
            Ok(())
        }),
    );
    services.add(
        0x2000_0001,
        1,
        2,
        Procedure::new(|call| {
            assert_eq!(call.read_chunk(0).unwrap(), &[7; 5000]);
            let n = call.result_mut(0).unwrap().len();
            call.result_mut(0).unwrap().fill(9);
            call.set_result_len(0, n - 1);
            Ok(())
        })
        .read_chunks(1, 1 << 20)
        .write_chunks(1, 1 << 20),
    );
    let _server = Server::start(&address, services, &ServerConfig::default()).unwrap();
    let mut client = LocalClient::connect(&address, ClientConfig::new(0x2000_0001, 1)).unwrap();
    for i in 0..1000u32 {
        let mut call = client.prepare(1, 64).unwrap();
        call.args_mut().fill(i as u8);
        let reply = client.call(call).unwrap();
        assert_eq!(reply.results(), [i as u8; 64]);
    }
    for _ in 0..100 {
        let mut call = client.prepare_with_chunks(2, 64).unwrap();
        let first = client.first();
        let mut data = client.alloc(first, 5000).unwrap();
        data.fill(7);
        let room = client.alloc(first, 70000).unwrap();
        call.send_chunk(4, data).unwrap();
        call.receive_chunk(room).unwrap();
        let mut reply = client.call(call).unwrap();
        assert_eq!(reply.chunk(0).unwrap(), &[9; 69999][..]);
        assert_eq!(reply.take_sent().next().unwrap().len(), 5000);
    }
    println!("{:?}", client.stats().fabric);
}
