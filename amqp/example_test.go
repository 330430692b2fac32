package inboxamqp_test

import (
	"log"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-amqp/v2/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

// One router handler with four messages in flight, on a quorum queue that keeps what it cannot deliver.
func Example() {
	config := amqp.NewDurableQueueConfig("amqp://guest:guest@localhost:5672/")
	config.Marshaler = inboxamqp.Marshaler{}
	config.Publish.ConfirmDelivery = true
	config.Queue.Arguments = amqp091.Table{
		"x-queue-type":              "quorum",
		"x-dead-letter-exchange":    "",
		"x-dead-letter-routing-key": "orders.dead", // declare this queue, too
	}

	subscriber, err := amqp.NewSubscriber(config, watermill.NopLogger{})
	if err != nil {
		log.Fatal(err)
	}
	concurrent, err := inboxamqp.Concurrent(subscriber, 4)
	if err != nil {
		log.Fatal(err)
	}

	router := message.NewDefaultRouter(watermill.NopLogger{})
	router.AddConsumerHandler("billing", "orders", concurrent, func(msg *message.Message) error {
		log.Printf("order %s, redelivered: %q", msg.UUID, msg.Metadata[inboxamqp.RedeliveredKey])
		return nil
	})
}

// Other AMQP properties are a few lines in a marshaler that embeds this one.
type typedMarshaler struct{ inboxamqp.Marshaler }

func (m typedMarshaler) Unmarshal(delivery amqp091.Delivery) (*message.Message, error) {
	msg, err := m.Marshaler.Unmarshal(delivery)
	if err == nil {
		msg.Metadata["type"] = delivery.Type
	}
	return msg, err
}

func ExampleMarshaler() {
	config := amqp.NewDurableQueueConfig("amqp://guest:guest@localhost:5672/")
	config.Marshaler = typedMarshaler{inboxamqp.Marshaler{
		PostprocessPublishing: func(publishing amqp091.Publishing) amqp091.Publishing {
			publishing.Type, _ = publishing.Headers["type"].(string)
			delete(publishing.Headers, "type")
			return publishing
		},
	}}
}
