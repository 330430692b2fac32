package main

import (
	"context"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	amqp091 "github.com/rabbitmq/amqp091-go"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

// broker puts messages into queues of RabbitMQ.
type broker struct {
	uri  string
	conn *amqp091.Connection
}

func newBroker(uri string) (*broker, error) {
	conn, err := amqp091.Dial(uri)
	if err != nil {
		return nil, fmt.Errorf("RabbitMQ: %w", err)
	}
	return &broker{uri, conn}, nil
}

func (b *broker) close() error { return b.conn.Close() }

// version is what the server says it is.
func (b *broker) version() string { return fmt.Sprint(b.conn.Properties["version"]) }

// fill makes a queue and returns its name when it holds so many messages.
func (b *broker) fill(ctx context.Context, messages int) (queue string, err error) {
	channel, err := b.conn.Channel()
	if err != nil {
		return "", err
	}
	defer channel.Close()
	queue = "bench." + watermill.NewShortUUID()
	if _, err := channel.QueueDeclare(queue, true, false, false, false, nil); err != nil {
		return "", err
	}
	if err := channel.Confirm(false); err != nil {
		return queue, err
	}
	confirmations := make([]*amqp091.DeferredConfirmation, messages)
	for i := range confirmations {
		publishing, err := inboxamqp.Marshaler{}.Marshal(newMessage(watermill.NewUUID()))
		if err != nil {
			return queue, err
		}
		if confirmations[i], err = channel.PublishWithDeferredConfirmWithContext(ctx, "", queue, true, false, publishing); err != nil {
			return queue, err
		}
	}
	for _, confirmation := range confirmations {
		if confirmed, err := confirmation.WaitContext(ctx); err != nil || !confirmed {
			return queue, fmt.Errorf("a message was not confirmed: %w", err)
		}
	}
	return queue, nil
}

// drop removes the queue.
func (b *broker) drop(queue string) error {
	channel, err := b.conn.Channel()
	if err != nil {
		return err
	}
	defer channel.Close()
	_, err = channel.QueueDelete(queue, false, false, false)
	return err
}
