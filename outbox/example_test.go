package outbox_test

import (
	"encoding/json"
	"log"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/outbox"
)

// The outbox: what the event bus publishes inside a handler is committed with the handler's work.
func ExamplePublisher() {
	publisher, err := outbox.NewPublisher(outbox.Options{SchemaAdapter: watermillsql.DefaultPostgreSQLSchema{}})
	if err != nil {
		log.Fatal(err)
	}
	type paymentBooked struct{ ID string }

	// In a handler: the message carries the handler's context, in which the transaction is found.
	handler := func(msg *message.Message) error {
		payload, err := json.Marshal(paymentBooked{ID: msg.UUID})
		if err != nil {
			return err
		}
		return publisher.Publish("events", message.NewMessageWithContext(msg.Context(), watermill.NewUUID(), payload))
	}
	_ = handler

	// What handlers return goes the same way, and the router publishes nothing.
	options := inbox.Options{Outbox: publisher}
	_ = options
}
