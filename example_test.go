package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/inboxtest"
)

// Three copies arrive and the handler runs once. The repository here is in memory, for unit tests; see
// package inboxsql for the real ones.
func ExampleMiddleware() {
	logger := watermill.NopLogger{}
	repository := inboxtest.NewMemoryRepository()
	once, err := inbox.NewMiddleware(repository, inbox.Options{})
	if err != nil {
		log.Fatal(err)
	}
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		log.Fatal(err)
	}
	if err := once.AddTo(router, inbox.RouterOptions{}); err != nil {
		log.Fatal(err)
	}

	broker := gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, logger)
	router.AddConsumerHandler("book_payment", "payments", broker, func(msg *message.Message) error {
		fmt.Println("booking", msg.UUID)
		return repository.Write(msg.Context(), string(msg.Payload))
	})

	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error)
	go func() { stopped <- router.Run(ctx) }()
	<-router.Running()
	for range 3 {
		if err := broker.Publish("payments", message.NewMessage("payment-7", []byte("100 EUR"))); err != nil {
			log.Fatal(err)
		}
	}
	cancel()
	if err := <-stopped; err != nil {
		log.Fatal(err)
	}
	fmt.Println("ledger:", repository.Effects())
	// Output:
	// booking payment-7
	// ledger: [100 EUR]
}

// The database transaction does not cover a payment provider. The key does: it is the same for every copy
// of the message, so the provider charges once even if our commit fails after the call.
func ExampleKeyFromContext() {
	type provider interface {
		Charge(ctx context.Context, idempotencyKey string, cents int) error
	}
	var payments provider

	handler := func(msg *message.Message) error {
		key, ok := inbox.KeyFromContext(msg.Context())
		if !ok {
			return errors.New("the inbox middleware is missing")
		}
		return payments.Charge(msg.Context(), key.Consumer+"/"+key.MessageID, 1999)
	}
	_ = handler
}

// What makes two messages the same message? A decision guide.
func ExampleOptions_messageID() {
	guide := map[string]func(*message.Message) string{
		// The producer repeats a message with its UUID (an outbox, a broker's redelivery): the default.
		"uuid": inbox.MessageUUID,
		// The producer makes a new UUID when it repeats an event, and the event has a number of its own.
		"event number": inbox.MessageIDFromMetadata("order_id"),
		// Some producers set the number and others do not. Take it only if both name the same thing.
		"either": inbox.FirstMessageID(inbox.MessageIDFromMetadata("order_id"), inbox.MessageUUID),
		// The number is inside of the payload, and it is the producer's promise that it is unique.
		"payload": func(msg *message.Message) string {
			id, _, _ := strings.Cut(string(msg.Payload), ":")
			return id
		},
		// Never a hash of the payload: two equal payments are two payments.
	}

	msg := message.NewMessage("5f0c", []byte("pay-7:100 EUR"))
	msg.Metadata.Set("order_id", "order-7")
	for _, name := range []string{"uuid", "event number", "either", "payload"} {
		fmt.Println(name+":", guide[name](msg))
	}
	// Output:
	// uuid: 5f0c
	// event number: order-7
	// either: order-7
	// payload: pay-7
}

// Two handler names may claim as one consumer, so that a renamed handler keeps its records.
func ExampleOptions_consumer() {
	options := inbox.Options{Consumer: func(handlerName string) string {
		if handlerName == "book_payment_v2" {
			return "book_payment"
		}
		return handlerName
	}}
	fmt.Println(options.Consumer("book_payment_v2"), options.Consumer("send_receipt"))
	// Output: book_payment send_receipt
}

// A retry does not mend an unknown currency: the message goes to the poison queue at once.
func ExamplePermanent() {
	handler := func(msg *message.Message) error {
		if currency := msg.Metadata.Get("currency"); currency != "EUR" {
			return inbox.Permanent(fmt.Errorf("unknown currency %q", currency))
		}
		return nil
	}
	err := handler(message.NewMessage("1", nil))
	fmt.Println(err, inbox.ShouldPoison(err))
	// Output: unknown currency "" true
}

// Records are kept for ever unless a cleaner runs. It ends with its context.
func ExampleCleaner() {
	ctx, cancel := context.WithCancel(context.Background())
	cleaner, err := inbox.NewCleaner(inboxtest.NewMemoryRepository(), inbox.CleanerOptions{
		Consumers: inbox.NamedConsumers("charge_card", "update_search", "send_invoice"),
		Retention: inbox.Retention{
			Default:   30 * 24 * time.Hour,
			Consumers: map[string]time.Duration{"charge_card": inbox.KeepForever, "update_search": 24 * time.Hour},
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- cleaner.Run(ctx) }()

	cancel() // with the service
	fmt.Println(<-done)
	// Output: context canceled
}
