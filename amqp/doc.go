// Package inboxamqp has what an inbox needs beside watermill-amqp: [Marshaler] and [Concurrent].
//
//	config := amqp.NewDurableQueueConfig(uri)
//	config.Marshaler = inboxamqp.Marshaler{}
//	config.Publish.ConfirmDelivery = true
//
// # Why another marshaler
//
// Three faults of amqp.DefaultMarshaler (watermill-amqp v2.1.3) take the ground from under an inbox:
//
//   - A message without the header _watermill_message_uuid, so every message of a publisher that does not use
//     Watermill, gets the empty UUID. The AMQP message-id is ignored. The inbox refuses empty ids, because
//     unrelated messages would pass for copies of each other.
//   - A header that is not a string is refused before any handler is called, and the message nacked. RabbitMQ
//     itself adds such headers: x-delivery-count when a quorum queue redelivers, x-death when a message was
//     dead-lettered. So after one handler error on a quorum queue the message never reaches the handler again; it is
//     redelivered and refused without pause, hundreds of times a second.
//   - A consumer that the broker ends, for example because its queue was deleted, gives the handler an empty
//     message that nobody has published. A lost connection does so now and then. See [ErrNoDelivery].
//
// # Publishing
//
// The presets of watermill-amqp leave publisher confirms off: Publish returns nil when the message is in a
// socket buffer. Set Config.Publish.ConfirmDelivery, and nil means that the broker has stored it.
// Do not set Config.Publish.Transactional: in watermill-amqp v2.1.3 Publish then returns nil also when it failed.
//
// An unroutable message is confirmed and gone. That is one published to an exchange without a matching binding, or
// to a queue that nobody has declared. Config.Publish.Mandatory changes nothing, because watermill-amqp does not
// listen for returned messages. The publisher declares its exchange but never a queue, so declare queues
// before the first publish, with SubscribeInitialize of a subscriber or outside of the program, or give the
// exchange an alternate exchange that ends in a queue (Config.Exchange.Arguments, "alternate-exchange"). Declare
// them well ahead: RabbitMQ 3.10.8 forgot a durable queue when it was killed right after the declaration.
//
// This is most easily forgotten for the poison queue, which has no subscriber: with NewDurableQueueConfig the
// topic given to middleware.PoisonQueueWithFilter is the name of the queue, and every poisoned message is lost until a
// queue of that name exists. Use one for each consumer, such as "orders.poison", and declare it at the start:
//
//	err := subscriber.SubscribeInitialize("orders.poison")
//
// A poisoned message keeps its UUID and, since the inbox has rolled back, no record of it exists: move it back
// to its queue when the handler is mended and it is handled once.
//
// Metadata travels as headers, which RabbitMQ takes up to its frame size, 128 KiB by default. More than that, say
// the text of a huge error on its way to the poison queue, ends the whole connection, not just that publish.
//
// # One queue, one consumer
//
// A subscription handles one message at a time, whatever the prefetch count (1 in the presets: keep it, more would
// only wait in this process). Several router handlers on one queue are no way to more: each has its own name, the
// inbox takes them for several consumers, and a message that is delivered to two of them has its effect twice.
// Use [Concurrent], or more processes with the same handler name.
//
// # Order
//
// One subscription of one process sees the messages of a queue in their order, except those that were nacked: a
// quorum queue without a delivery limit puts them at its end, and any other consumer of the queue may have overtaken.
// With Concurrent or several processes there is no order.
//
// # Redelivery
//
// Watermill answers each handler error with a nack, and RabbitMQ redelivers at once. Put middleware.Retry with
// a back-off outside the inbox, or an outage of the database turns into a busy loop.
//
// A quorum queue drops a message that has exceeded its delivery limit (20 from RabbitMQ 4.0 on, before that none)
// unless it has a dead-letter exchange: give it one. RabbitMQ 4.3 and later do not count nacks, so there the limit
// never ends a loop of handler errors, and middleware.PoisonQueueWithFilter has to.
//
// With Config.Consume.NoRequeueOnNack every nack drops the message or sends it to the dead-letter exchange. That
// includes the nacks of what is in hand when the subscriber is closed, so without a dead-letter exchange every
// restart loses messages.
//
// # Stopping
//
// On SIGTERM call router.Close, or add plugin.SignalsHandler, rather than ending the context given to router.Run.
// Close nacks what is in hand once. When a context ends, watermill-amqp v2.1.3 goes on to take messages and to return
// them until it happens to look at the context, and every one counts against the delivery limit of a quorum
// queue: up to 14 failed deliveries of one message in a shutdown with four in flight, against 2 to 5 with Close.
// The CloseTimeout of the router counts with Close only.
//
// # Slow handlers
//
// RabbitMQ closes the channel of a consumer that takes longer than consumer_timeout (30 minutes by default) to
// answer, and delivers the message to another one while the first handler still runs. The inbox keeps the effect
// single: the copy waits for the claim of the first, at most for the inbox's ClaimTimeout, and is then
// nacked. But the first consumer notices only when its handler is done. Keep the handler's time with all its
// retries and their pauses, plus ClaimTimeout, well below consumer_timeout.
//
// # What cannot be mended here
//
// The client library amqp091-go v1.10.0 does not know the unsigned 16- and 32-bit header types, which publishers with
// AMQP 1.0 can produce. A message with one breaks the connection of every consumer that it is delivered to.
package inboxamqp
