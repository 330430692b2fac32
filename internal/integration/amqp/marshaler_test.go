package amqp_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

const uuidHeader = amqp.DefaultMessageUUIDHeaderKey

var errHandler = errors.New("handler fails")

func TestForeignPublisher(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	queue := b.name("queue")
	b.declare(queue, nil)

	id := func(n int) string { return strings.Repeat("0123456789", n/10+1)[:n] }
	type foreign struct {
		name      string
		headers   amqp091.Table
		messageID string
		wantUUID  string
		wantKept  string
	}
	cases := []foreign{
		{name: "nothing"},
		{name: "message-id", messageID: "m", wantUUID: "m"},
		{name: "message-id of 255 bytes", messageID: id(255), wantUUID: id(255)},
		// What amqp091-go up to v1.10 really sends for longer ones: the length is taken modulo 256. Later ones refuse.
		{name: "message-id of 256 bytes", messageID: id(256), wantUUID: ""},
		{name: "message-id of 300 bytes", messageID: id(300), wantUUID: id(44)},
		{name: "message-id of arbitrary bytes", messageID: "a\x00\xff", wantUUID: "a\x00\xff"},
		{name: "header", headers: amqp091.Table{uuidHeader: "h"}, messageID: "m", wantUUID: "h"},
		{name: "empty header", headers: amqp091.Table{uuidHeader: ""}, wantUUID: ""},
		{name: "empty header, message-id", headers: amqp091.Table{uuidHeader: ""}, messageID: "m", wantUUID: "m"},
		{name: "header of 255 bytes", headers: amqp091.Table{uuidHeader: id(255)}, wantUUID: id(255)},
		{name: "header of 256 bytes", headers: amqp091.Table{uuidHeader: id(256)}, wantUUID: id(256)},
		{name: "header of 300 bytes", headers: amqp091.Table{uuidHeader: id(300)}, wantUUID: id(300)},
		{name: "header with NUL", headers: amqp091.Table{uuidHeader: "a\x00b"}, wantUUID: "a\x00b"},
		{name: "header of invalid UTF-8", headers: amqp091.Table{uuidHeader: "\xff\xfe\xed\xa0\x80"}, wantUUID: "\xff\xfe\xed\xa0\x80"},
		{name: "binary header", headers: amqp091.Table{uuidHeader: []byte("b\xff")}, messageID: "m", wantUUID: "b\xff"},
		{name: "int header", headers: amqp091.Table{uuidHeader: int32(42)}, messageID: "m", wantUUID: "m", wantKept: "42"},
		{name: "int header only", headers: amqp091.Table{uuidHeader: int64(42)}, wantUUID: "", wantKept: "42"},
	}
	cases = slices.DeleteFunc(cases, func(tc foreign) bool {
		err := b.tryPublish(queue, amqp091.Publishing{Headers: tc.headers, MessageId: tc.messageID, Body: []byte(tc.name)})
		if err != nil && len(tc.messageID) <= 255 {
			t.Fatalf("%s: %v", tc.name, err)
		}
		return err != nil
	})

	messages, stop := collect(t, b.subscriber(b.config(nil), watermill.NopLogger{}), queue)
	for _, tc := range cases {
		msg := await(t, messages, tc.name)
		if string(msg.Payload) != tc.name {
			t.Fatalf("got %q, want %q", msg.Payload, tc.name)
		}
		if msg.UUID != tc.wantUUID {
			t.Errorf("%s: UUID %q, want %q", tc.name, msg.UUID, tc.wantUUID)
		}
		if got := msg.Metadata.Get(uuidHeader); got != tc.wantKept {
			t.Errorf("%s: UUID header in the metadata %q, want %q", tc.name, got, tc.wantKept)
		}
	}
	stop()
	b.mustBeEmpty(queue)
}

func TestForeignHeaders(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	queue := b.name("queue")
	b.declare(queue, nil)
	b.publish(queue, amqp091.Publishing{Headers: amqp091.Table{
		"string": "s\x00\xff", "bytes": []byte("b\x00\xff"), "int32": int32(-1), "int64": int64(1) << 40, "int16": int16(2),
		"int8": int8(-3), "uint8": uint8(255), "bool": true, "float32": float32(0.5), "float64": 0.1, "nil": nil,
		"time": time.Unix(1, 0), "decimal": amqp091.Decimal{Scale: 2, Value: 5},
		"list":  []any{"a", int32(1), []any{}, amqp091.Table{"z": nil, "y": false}},
		"table": amqp091.Table{"b": "2", "a": []any{}},
		"\x00":  "odd name", "": "no name", strings.Repeat("n", 255): "long name",
	}})

	messages, _ := collect(t, b.subscriber(b.config(nil), watermill.NopLogger{}), queue)
	got := await(t, messages, "the message").Metadata
	want := message.Metadata{
		"string": "s\x00\xff", "bytes": "b\x00\xff", "int32": "-1", "int64": "1099511627776", "int16": "2",
		"int8": "-3", "uint8": "255", "bool": "true", "float32": "0.5", "float64": "0.1", "nil": "",
		"time": "1970-01-01T00:00:01Z", "decimal": "0.05",
		"list":  `["a",1,[],{"y":false,"z":null}]`,
		"table": `{"a":[],"b":"2"}`,
		"\x00":  "odd name", "": "no name", strings.Repeat("n", 255): "long name",
	}
	for key := range want {
		if got[key] != want[key] {
			t.Errorf("%q: %q, want %q", key, got[key], want[key])
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d keys, want %d: %q", len(got), len(want), got)
	}
}

// What a plain consumer sees of a message published with the marshaler, and what another router gets.
func TestPublishedIDs(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ length, messageID int }{{0, 0}, {1, 1}, {255, 255}, {256, 0}, {300, 0}} {
		t.Run(fmt.Sprint(tc.length), func(t *testing.T) {
			t.Parallel()
			b := newBroker(t)
			queue := b.name("queue")
			b.declare(queue, nil)
			config := b.config(nil)
			publisher := b.publisher(config)

			sent := message.NewMessage(strings.Repeat("x", tc.length), []byte("body"))
			sent.Metadata.Set("key", "value\x00\xff")
			if err := publisher.Publish(queue, sent); err != nil {
				t.Fatal(err)
			}
			delivery := b.take(queue)
			if len(delivery.MessageId) != tc.messageID || delivery.Headers[uuidHeader] != sent.UUID || delivery.DeliveryMode != amqp091.Persistent {
				t.Errorf("message-id of %d bytes, want %d; headers %q, mode %d", len(delivery.MessageId), tc.messageID, delivery.Headers, delivery.DeliveryMode)
			}

			if err := publisher.Publish(queue, sent); err != nil {
				t.Fatal(err)
			}
			messages, _ := collect(t, b.subscriber(config, watermill.NopLogger{}), queue)
			if got := await(t, messages, "the message"); !got.Equals(sent) {
				t.Errorf("got %q %q %q", got.UUID, got.Metadata, got.Payload)
			}
		})
	}
}

func quorum() amqp091.Table { return amqp091.Table{"x-queue-type": "quorum"} }

func TestQuorumQueueRedeliveryReachesTheHandler(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	queue := b.name("queue")
	subscriber := b.subscriber(b.config(quorum()), watermill.NopLogger{})
	if err := subscriber.SubscribeInitialize(queue); err != nil {
		t.Fatal(err)
	}
	b.publish(queue, amqp091.Publishing{MessageId: "m", Headers: amqp091.Table{"attempt": int32(1)}})

	deliveries := make(chan *message.Message, 10)
	var handled settling
	failures := 3
	stop := startRouter(t, watermill.NopLogger{}, func(router *message.Router) {
		router.AddConsumerHandler("handler", queue, subscriber, func(msg *message.Message) error {
			handled.add(msg)
			deliveries <- msg
			if failures--; failures >= 0 {
				return errHandler
			}
			return nil
		})
	})

	want := message.Metadata{"attempt": "1"}
	for i := range 4 {
		if i > 0 {
			want = message.Metadata{"attempt": "1", inboxamqp.RedeliveredKey: "true", inboxamqp.DeliveryCountKey: fmt.Sprint(i)}
		}
		msg := await(t, deliveries, fmt.Sprintf("delivery %d", i+1))
		got := maps.Clone(msg.Metadata)
		if got[inboxamqp.AcquiredCountKey] != "" { // RabbitMQ 4.3 counts a nack here and only here
			delete(got, inboxamqp.AcquiredCountKey)
			delete(got, inboxamqp.DeliveryCountKey)
			delete(want, inboxamqp.DeliveryCountKey)
		}
		if msg.UUID != "m" || !maps.Equal(got, want) {
			t.Errorf("delivery %d: %q with %q, want %q", i+1, msg.UUID, got, want)
		}
	}
	handled.wait(t)
	stop()
	b.mustBeEmpty(queue)
}

// The reason for the marshaler: the default one refuses the redelivery, which is redelivered, and so on.
func TestQuorumQueueWithDefaultMarshaler(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	queue := b.name("queue")
	arguments := quorum()
	arguments["x-delivery-limit"] = int32(1_000_000) // RabbitMQ 4 would drop the message after 20
	config := b.config(arguments)
	config.Marshaler = amqp.DefaultMarshaler{}
	refusals := newErrorLog("Processing message failed")
	subscriber := b.subscriber(config, refusals)
	if err := subscriber.SubscribeInitialize(queue); err != nil {
		t.Fatal(err)
	}

	var calls atomic.Int32
	startRouter(t, watermill.NopLogger{}, func(router *message.Router) {
		router.AddConsumerHandler("handler", queue, subscriber, func(*message.Message) error {
			calls.Add(1)
			return errHandler
		})
	})
	if err := b.publisher(config).Publish(queue, message.NewMessage("m", nil)); err != nil {
		t.Fatal(err)
	}

	begin := time.Now()
	const enough = 200
	for i := range enough {
		line := await(t, refusals.lines, fmt.Sprintf("refusal %d", i+1))
		if i == 0 && !strings.Contains(line, inboxamqp.DeliveryCountKey) && !strings.Contains(line, inboxamqp.AcquiredCountKey) {
			t.Errorf("refused because of something else: %s", line)
		}
	}
	t.Logf("one handler error, then %d refused redeliveries in %s", enough, time.Since(begin).Round(time.Millisecond))
	if calls.Load() != 1 {
		t.Errorf("the handler was called %d times; if the default marshaler has learnt this, say so in the documentation", calls.Load())
	}
}

// retryTopology is a work queue whose nacked messages wait in a second queue and then return.
func retryTopology(b *broker) (work string, arguments amqp091.Table) {
	work, retry := b.name("work"), b.name("retry")
	arguments = amqp091.Table{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": retry}
	b.declare(work, arguments)
	b.declare(retry, amqp091.Table{
		"x-dead-letter-exchange": "", "x-dead-letter-routing-key": work, "x-message-ttl": int32(50),
	})
	return work, arguments
}

func TestDeadLetterRetryReachesTheHandler(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	work, arguments := retryTopology(b)
	parked := b.name("parked")
	b.declare(parked, nil)
	config := b.config(arguments)
	config.Consume.NoRequeueOnNack = true
	b.publish(work, amqp091.Publishing{MessageId: "m"})

	deliveries := make(chan *message.Message, 10)
	var handled settling
	failures := 2
	stop := startRouter(t, watermill.NopLogger{}, func(router *message.Router) {
		router.AddHandler("handler", work, b.subscriber(config, watermill.NopLogger{}), parked, b.publisher(b.config(nil)),
			func(msg *message.Message) ([]*message.Message, error) {
				handled.add(msg)
				deliveries <- msg
				if failures--; failures >= 0 {
					return nil, errHandler
				}
				return []*message.Message{msg.Copy()}, nil // forwarded with all its metadata, as PoisonQueue does
			})
	})

	if msg := await(t, deliveries, "the first delivery"); msg.Metadata[inboxamqp.DeathKey] != "" {
		t.Errorf("first delivery with %q", msg.Metadata)
	}
	for i := 1; i <= 2; i++ {
		msg := await(t, deliveries, fmt.Sprintf("return %d", i))
		var deaths []struct {
			Queue, Reason string
			Count         int
		}
		if err := json.Unmarshal([]byte(msg.Metadata[inboxamqp.DeathKey]), &deaths); err != nil {
			t.Fatalf("x-death %q: %v", msg.Metadata[inboxamqp.DeathKey], err)
		}
		if len(deaths) != 2 || deaths[0].Reason != "expired" || deaths[0].Count != i || deaths[1].Queue != work || deaths[1].Count != i {
			t.Errorf("return %d with x-death %+v", i, deaths)
		}
		if msg.UUID != "m" || msg.Metadata["x-first-death-reason"] != "rejected" {
			t.Errorf("return %d: %q with %q", i, msg.UUID, msg.Metadata)
		}
	}

	forwarded := b.take(parked)
	if want := (amqp091.Table{uuidHeader: "m"}); !maps.Equal(forwarded.Headers, want) {
		t.Errorf("forwarded with %q, want %q", forwarded.Headers, want)
	}
	handled.wait(t)
	stop()
	b.mustBeEmpty(work)
}

func TestDeadLetterRetryWithDefaultMarshaler(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	work, arguments := retryTopology(b)
	config := b.config(arguments)
	config.Consume.NoRequeueOnNack = true
	config.Marshaler = amqp.DefaultMarshaler{}
	refusals := newErrorLog("metadata x-")

	var calls atomic.Int32
	startRouter(t, watermill.NopLogger{}, func(router *message.Router) {
		router.AddConsumerHandler("handler", work, b.subscriber(config, refusals), func(*message.Message) error {
			calls.Add(1)
			return errHandler
		})
	})
	b.publish(work, amqp091.Publishing{})
	for i := range 5 {
		await(t, refusals.lines, fmt.Sprintf("refusal %d", i+1))
	}
	if calls.Load() != 1 {
		t.Errorf("the handler was called %d times, want 1 and refusals", calls.Load())
	}
}

// A message that was published with a CC header cannot be forwarded by someone who writes what it reads:
// RabbitMQ wants lists and would route by them.
func TestForwardingDoesNotRouteByCC(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	first, copied, target := b.name("first"), b.name("copied"), b.name("target")
	for _, queue := range []string{first, copied, target} {
		b.declare(queue, nil)
	}
	b.publish(first, amqp091.Publishing{MessageId: "m", Headers: amqp091.Table{"CC": []any{copied}, "kept": "k"}})
	b.take(copied)

	config := b.config(nil)
	var handled settling
	stop := startRouter(t, watermill.NopLogger{}, func(router *message.Router) {
		router.AddHandler("forward", first, b.subscriber(config, watermill.NopLogger{}), target, b.publisher(config),
			func(msg *message.Message) ([]*message.Message, error) {
				handled.add(msg)
				return []*message.Message{msg}, nil
			})
	})
	forwarded := b.take(target)
	if want := (amqp091.Table{uuidHeader: "m", "kept": "k"}); !maps.Equal(forwarded.Headers, want) {
		t.Errorf("forwarded with %q, want %q", forwarded.Headers, want)
	}
	handled.wait(t)
	stop()
	b.mustBeEmpty(first)
	b.mustBeEmpty(copied)

	// With the header as a string, which is all that metadata can hold, the publish fails every time.
	config.Marshaler = amqp.DefaultMarshaler{}
	msg := message.NewMessage("m", nil)
	msg.Metadata.Set("CC", `["`+copied+`"]`)
	if err := b.publisher(config).Publish(target, msg); err == nil {
		t.Error("RabbitMQ now takes a CC header that is a string")
	} else {
		t.Logf("CC as a string: %v", err)
	}
}

func TestLongHeaderNameIsRefusedBeforeItIsSent(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	queue := b.name("queue")
	b.declare(queue, nil)
	publisher := b.publisher(b.config(nil))
	msg := message.NewMessage("m", nil)
	msg.Metadata.Set(strings.Repeat("n", 300), "v")
	if err := publisher.Publish(queue, msg); !errors.Is(err, inboxamqp.ErrHeaderName) {
		t.Errorf("Publish: %v", err)
	}
	b.mustBeEmpty(queue)

	// What the client library up to v1.10 would have sent. Later ones refuse.
	if err := b.tryPublish(queue, amqp091.Publishing{Headers: amqp091.Table{strings.Repeat("n", 300): "v"}}); err != nil {
		t.Logf("the client library says: %v", err)
		return
	}
	if got := b.take(queue).Headers; got[strings.Repeat("n", 44)] != "v" {
		t.Errorf("a name of 300 bytes arrives as %q", got)
	}
}

// Unroutable messages are confirmed, Mandatory or not: watermill-amqp does not listen for returns.
func TestUnroutableMessagesAreConfirmedAndLost(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	for _, mandatory := range []bool{false, true} {
		config := b.config(nil)
		config.Publish.Mandatory = mandatory
		missing := b.name("missing")
		if err := b.publisher(config).Publish(missing, message.NewMessage("m", nil)); err != nil {
			t.Errorf("mandatory %t: unroutable message reported: %v; say so in the documentation", mandatory, err)
		}
		if ready := b.ready(missing); ready != -1 {
			t.Errorf("mandatory %t: there is a queue now, with %d messages", mandatory, ready)
		}
	}
}

// With transactions, watermill-amqp reports success for a message that it could not publish.
func TestTransactionalPublisherHidesErrors(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	queue := b.name("queue")
	b.declare(queue, nil)
	config := b.config(nil)
	config.Publish.ConfirmDelivery = false
	config.Publish.Transactional = true
	msg := message.NewMessage("m", nil)
	msg.Metadata.Set(strings.Repeat("n", 300), "v")
	if err := b.publisher(config).Publish(queue, msg); err != nil {
		t.Errorf("error reported: %v; say so in the documentation", err)
	}
	b.mustBeEmpty(queue)

	config.Publish.ConfirmDelivery = true
	if err := b.publisher(config).Publish(queue, message.NewMessage("m", nil)); err == nil {
		t.Error("transactions and confirms can be combined; say so in the documentation")
	}
}

// Without a dead-letter exchange, NoRequeueOnNack loses what is in hand when the subscriber is closed.
func TestNoRequeueOnNackLosesOnClose(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	queue := b.name("queue")
	b.declare(queue, nil)
	b.publish(queue, amqp091.Publishing{MessageId: "m"})
	config := b.config(nil)
	config.Consume.NoRequeueOnNack = true
	inHand := make(chan struct{})
	stop := startRouter(t, watermill.NopLogger{}, func(router *message.Router) {
		router.AddConsumerHandler("handler", queue, b.subscriber(config, watermill.NopLogger{}), func(msg *message.Message) error {
			close(inHand)
			<-msg.Context().Done()
			return msg.Context().Err()
		})
	})
	await(t, inHand, "the message in hand")
	stop()
	b.mustBeEmpty(queue)
}

// The way out that the documentation gives.
func TestAlternateExchangeCatchesUnroutableMessages(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	exchange, alternate, unrouted := b.name("exchange"), b.name("alternate"), b.name("unrouted")
	b.declare(unrouted, nil)
	b.must(func(c *amqp091.Channel) error {
		if err := c.ExchangeDeclare(alternate, "fanout", true, false, false, false, nil); err != nil {
			return err
		}
		return c.QueueBind(unrouted, "", alternate, false, nil)
	})
	config := amqp.NewDurablePubSubConfig(b.uri, nil)
	config.Marshaler = inboxamqp.Marshaler{}
	config.Publish.ConfirmDelivery = true
	config.Exchange.Arguments = amqp091.Table{"alternate-exchange": alternate}
	if err := b.publisher(config).Publish(exchange, message.NewMessage("m", nil)); err != nil {
		t.Fatal(err)
	}
	if got := b.take(unrouted).MessageId; got != "m" {
		t.Errorf("caught %q", got)
	}
}
