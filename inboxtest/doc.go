// Package inboxtest tests handlers and repositories of watermill-inbox. [MemoryRepository] is a repository for unit
// tests. [FaultRepository] makes any repository fail at a chosen step.
//
// The package imports the standard library, Watermill and the root package only.
//
// # Your handler
//
// [TestHandler] runs a handler of yours behind the inbox, with one fault after the other. It fails if the effect of a
// message is lost, done twice or left half done, and says what to change. [CheckHandler] returns the failures instead.
// Both take a [Handler].
//
// # Your repository
//
// [TestRepository] holds an implementation of [inbox.Repository] to the contract of that interface, and to the outcome
// table of the middleware. It takes a [RepositorySubject], and [RepositoryFeatures] for what differs between databases.
package inboxtest
