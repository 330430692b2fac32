package main

import (
	"context"
	"strconv"

	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// variant is a way to process a message: credit one account, in a transaction.
type variant struct {
	name     string
	baseline string // the variant whose rate is 1; empty: this is one
	claims   bool   // it keeps a record of each message
	open     func(ctx context.Context, url string, connections int) (*consumer, error)
}

// consumer is a variant with its pool.
type consumer struct {
	handle message.NoPublishHandlerFunc
	close  func()
}

var variants = []variant{
	plainPQ,
	handWritten,
	inboxsqlPQ,
	inboxsqlFused,
	oneStatement,
	plainStdlib,
	inboxsqlStdlib,
	plainPGX,
	inboxPGX,
}

// consumerName is under which all variants claim.
const consumerName = "bench"

const credit = `UPDATE accounts SET balance = balance + 1 WHERE id = $1`

// account is the message's.
func account(msg *message.Message) (int, error) { return strconv.Atoi(string(msg.Payload)) }

// withInbox puts the middleware around a handler, as a router does.
func withInbox(repository inbox.Repository, handler message.NoPublishHandlerFunc) (message.NoPublishHandlerFunc, error) {
	once, err := inbox.NewMiddleware(repository, inbox.Options{Consumer: func(string) string { return consumerName }})
	if err != nil {
		return nil, err
	}
	wrapped := once.Middleware(func(msg *message.Message) ([]*message.Message, error) { return nil, handler(msg) })
	return func(msg *message.Message) error {
		_, err := wrapped(msg)
		return err
	}, nil
}
